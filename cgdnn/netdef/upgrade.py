"""Bring old forms of nets and solvers to today's, keeping the places of their fields.

The rules are those of Caffe's ``upgrade_proto.cpp``: V0 layers (``layers { layer { type: "conv"
.. } }``), V1 layers (``layers { type: CONVOLUTION .. }``), transformation fields inside data
parameters, ``input`` with ``input_dim`` or ``input_shape``, BatchNorm layers with three `param`,
and the solver's ``solver_type``. Where Caffe only logs that a field makes no sense and drops it,
a warning is kept in the `Located`.
"""

from __future__ import annotations

from typing import Any

from cgdnn.errors import DescriptionError
from cgdnn.netdef.text import Located, Place, did_you_mean, is_repeated
from cgdnn.proto import cgdnn_pb2 as pb

_V1 = pb.V1LayerParameter

# V0 type -> V1 type.
_V0_TYPES = {
    "accuracy": _V1.ACCURACY,
    "bnll": _V1.BNLL,
    "concat": _V1.CONCAT,
    "conv": _V1.CONVOLUTION,
    "data": _V1.DATA,
    "dropout": _V1.DROPOUT,
    "euclidean_loss": _V1.EUCLIDEAN_LOSS,
    "flatten": _V1.FLATTEN,
    "hdf5_data": _V1.HDF5_DATA,
    "hdf5_output": _V1.HDF5_OUTPUT,
    "im2col": _V1.IM2COL,
    "images": _V1.IMAGE_DATA,
    "infogain_loss": _V1.INFOGAIN_LOSS,
    "innerproduct": _V1.INNER_PRODUCT,
    "lrn": _V1.LRN,
    "multinomial_logistic_loss": _V1.MULTINOMIAL_LOGISTIC_LOSS,
    "pool": _V1.POOLING,
    "relu": _V1.RELU,
    "sigmoid": _V1.SIGMOID,
    "softmax": _V1.SOFTMAX,
    "softmax_loss": _V1.SOFTMAX_LOSS,
    "split": _V1.SPLIT,
    "tanh": _V1.TANH,
    "window_data": _V1.WINDOW_DATA,
}

# V1 type -> type of a layer.
_V1_TYPES = {
    _V1.NONE: "",
    _V1.ABSVAL: "AbsVal",
    _V1.ACCURACY: "Accuracy",
    _V1.ARGMAX: "ArgMax",
    _V1.BNLL: "BNLL",
    _V1.CONCAT: "Concat",
    _V1.CONTRASTIVE_LOSS: "ContrastiveLoss",
    _V1.CONVOLUTION: "Convolution",
    _V1.DATA: "Data",
    _V1.DECONVOLUTION: "Deconvolution",
    _V1.DROPOUT: "Dropout",
    _V1.DUMMY_DATA: "DummyData",
    _V1.ELTWISE: "Eltwise",
    _V1.EUCLIDEAN_LOSS: "EuclideanLoss",
    _V1.EXP: "Exp",
    _V1.FLATTEN: "Flatten",
    _V1.HDF5_DATA: "HDF5Data",
    _V1.HDF5_OUTPUT: "HDF5Output",
    _V1.HINGE_LOSS: "HingeLoss",
    _V1.IM2COL: "Im2col",
    _V1.IMAGE_DATA: "ImageData",
    _V1.INFOGAIN_LOSS: "InfogainLoss",
    _V1.INNER_PRODUCT: "InnerProduct",
    _V1.LRN: "LRN",
    _V1.MEMORY_DATA: "MemoryData",
    _V1.MULTINOMIAL_LOGISTIC_LOSS: "MultinomialLogisticLoss",
    _V1.MVN: "MVN",
    _V1.POOLING: "Pooling",
    _V1.POWER: "Power",
    _V1.RELU: "ReLU",
    _V1.SIGMOID: "Sigmoid",
    _V1.SIGMOID_CROSS_ENTROPY_LOSS: "SigmoidCrossEntropyLoss",
    _V1.SILENCE: "Silence",
    _V1.SLICE: "Slice",
    _V1.SOFTMAX: "Softmax",
    _V1.SOFTMAX_LOSS: "SoftmaxWithLoss",
    _V1.SPLIT: "Split",
    _V1.TANH: "TanH",
    _V1.THRESHOLD: "Threshold",
    _V1.WINDOW_DATA: "WindowData",
}

_DATA_PARAMS = {
    "data": "data_param",
    "hdf5_data": "hdf5_data_param",
    "images": "image_data_param",
    "window_data": "window_data_param",
}
_WEIGHT_PARAMS = {"conv": "convolution_param", "innerproduct": "inner_product_param"}
_WINDOW_PARAMS = {"conv": "convolution_param", "pool": "pooling_param"}
_LRN = {"lrn": "lrn_param"}
_IMAGES = {"images": "image_data_param"}
_WINDOW_DATA = {"window_data": "window_data_param"}

# V0 field -> (field in V1, {V0 type: V1 message that has it}). None: a field of the layer itself.
_V0_FIELDS: dict[str, tuple[str, dict[str, str] | None]] = {
    "name": ("name", None),
    "blobs": ("blobs", None),
    "blobs_lr": ("blobs_lr", None),
    "weight_decay": ("weight_decay", None),
    "hdf5_output_param": ("hdf5_output_param", None),
    "num_output": ("num_output", _WEIGHT_PARAMS),
    "biasterm": ("bias_term", _WEIGHT_PARAMS),
    "weight_filler": ("weight_filler", _WEIGHT_PARAMS),
    "bias_filler": ("bias_filler", _WEIGHT_PARAMS),
    "pad": ("pad", _WINDOW_PARAMS),
    "kernelsize": ("kernel_size", _WINDOW_PARAMS),
    "stride": ("stride", _WINDOW_PARAMS),
    "group": ("group", {"conv": "convolution_param"}),
    "pool": ("pool", {"pool": "pooling_param"}),
    "dropout_ratio": ("dropout_ratio", {"dropout": "dropout_param"}),
    "local_size": ("local_size", _LRN),
    "alpha": ("alpha", _LRN),
    "beta": ("beta", _LRN),
    "k": ("k", _LRN),
    "source": ("source", {**_DATA_PARAMS, "infogain_loss": "infogain_loss_param"}),
    "batchsize": ("batch_size", _DATA_PARAMS),
    "rand_skip": ("rand_skip", {"data": "data_param", **_IMAGES}),
    "shuffle_images": ("shuffle", _IMAGES),
    "new_height": ("new_height", _IMAGES),
    "new_width": ("new_width", _IMAGES),
    "concat_dim": ("concat_dim", {"concat": "concat_param"}),
    "det_fg_threshold": ("fg_threshold", _WINDOW_DATA),
    "det_bg_threshold": ("bg_threshold", _WINDOW_DATA),
    "det_fg_fraction": ("fg_fraction", _WINDOW_DATA),
    "det_context_pad": ("context_pad", _WINDOW_DATA),
    "det_crop_mode": ("crop_mode", _WINDOW_DATA),
}
_V0_TRANSFORM_FIELDS = {
    "scale": "scale",
    "meanfile": "mean_file",
    "cropsize": "crop_size",
    "mirror": "mirror",
}

# V1 type -> its message that once held the fields of transform_param.
_TRANSFORM_HOLDERS = {
    _V1.DATA: "data_param",
    _V1.IMAGE_DATA: "image_data_param",
    _V1.WINDOW_DATA: "window_data_param",
}
_TRANSFORM_FIELDS = ("scale", "mean_file", "crop_size", "mirror")

# V1 field, one value a parameter blob -> field of ParamSpec.
_PARAM_SPEC_FIELDS = {
    "param": "name",
    "blob_share_mode": "share_mode",
    "blobs_lr": "lr_mult",
    "weight_decay": "decay_mult",
}

_SOLVER_TYPES = {
    pb.SolverParameter.SGD: "SGD",
    pb.SolverParameter.NESTEROV: "Nesterov",
    pb.SolverParameter.ADAGRAD: "AdaGrad",
    pb.SolverParameter.RMSPROP: "RMSProp",
    pb.SolverParameter.ADADELTA: "AdaDelta",
    pb.SolverParameter.ADAM: "Adam",
}


def upgrade_net(net: Located) -> Located:
    """Return `net` with all layers in `layer`; `net` itself may be changed.

    Raises
    ------
    DescriptionError
        `layer` and `layers` are mixed, a V0 layer has an unknown type or a padding layer where
        none can be, or `input` and its sizes differ in number.
    """
    message, place = net.message, net.place
    if message.layer and message.layers:
        raise DescriptionError(
            f"{net.where('layers', 0)}: `layers` (V1) in a net whose other layers are written as "
            f"`layer`, first at {net.where('layer', 0)}; only one style is read. "
            'Upgrade every `layers { type: ENUM .. }` to `layer { type: "Name" .. }`.'
        )
    if message.layers:
        layers = list(message.layers)
        places = [place.child("layers", i) for i in range(len(layers))]
        if any(layer.HasField("layer") for layer in layers):
            layers, places = _merge_padding(net, layers, places)
            upgraded = [_v0_layer(net, *pair) for pair in zip(layers, places, strict=True)]
            layers, places = [layer for layer, _ in upgraded], [place for _, place in upgraded]
        place.children.pop("layers", None)
        for layer, layer_place in zip(layers, places, strict=True):
            _move_transform_fields(layer, layer_place)
            _v1_layer(layer, place.add("layer", layer_place), message.layer.add())
        message.ClearField("layers")
    if message.input:
        _upgrade_input(net)
    for layer in message.layer:
        if layer.type == "BatchNorm" and len(layer.param) == 3:
            for spec in layer.param:
                spec.lr_mult = 0
                spec.decay_mult = 0
    return net


def upgrade_solver(solver: Located) -> None:
    """Replace `solver_type` of `solver` by `type`.

    Raises
    ------
    DescriptionError
        Both are given and disagree.
    """
    message = solver.message
    if not message.HasField("solver_type"):
        return
    name = _SOLVER_TYPES[message.solver_type]
    if message.HasField("type"):
        both = f'type "{message.type}" (at {solver.where("type")})'
        if message.type != name:
            raise DescriptionError(
                f'{solver.where("solver_type")}: solver_type means "{name}", but there is also '
                f"{both}. Remove solver_type."
            )
        solver.warnings.append(
            f"{solver.where('solver_type')}: solver_type says the same as {both}. "
            "Remove solver_type."
        )
    else:
        solver.place.children["type"] = solver.place.children.pop("solver_type", [])
    message.type = name
    message.ClearField("solver_type")


def _put(holder: Any, name: str, value: Any) -> None:
    """Store `value`, one or a list, in field `name` of the message `holder`."""
    descriptor = holder.DESCRIPTOR.fields_by_name[name]
    if is_repeated(descriptor):
        getattr(holder, name).extend(value if hasattr(value, "extend") else [value])
    elif descriptor.message_type is not None:
        getattr(holder, name).CopyFrom(value)
    else:
        setattr(holder, name, value)


def _merge_padding(
    net: Located, layers: list[Any], places: list[Place]
) -> tuple[list[Any], list[Place]]:
    """Remove V0 padding layers and give their `pad` to the layer that reads them."""
    producers: dict[str, int] = {}
    kept = []
    for index, (layer, place) in enumerate(zip(layers, places, strict=True)):
        if layer.layer.type != "padding":
            kept.append(index)
        for position, bottom in enumerate(layer.bottom):
            source = layers[producers[bottom]] if bottom in producers else None
            if source is None or source.layer.type != "padding":
                continue
            source_place = places[producers[bottom]]
            if layer.layer.type not in _WINDOW_PARAMS or len(layer.bottom) != 1:
                raise DescriptionError(
                    f'{place}: layer "{layer.layer.name}" ({layer.layer.type}) reads the padding '
                    f'layer "{source.layer.name}"; only a conv or pool layer with one bottom can. '
                    "Remove the padding layer."
                )
            if len(source.bottom) != 1 or len(source.top) != 1:
                raise DescriptionError(
                    f'{source_place}: padding layer "{source.layer.name}" has '
                    f"{len(source.bottom)} bottoms and {len(source.top)} tops, expected one each."
                )
            layer.layer.pad = source.layer.pad
            layer.bottom[position] = source.bottom[0]
            inner = place.child("layer")
            inner.children["pad"] = [source_place.child("layer").child("pad")]
        producers.update(dict.fromkeys(layer.top, index))
    return [layers[i] for i in kept], [places[i] for i in kept]


def _v0_layer(net: Located, old: Any, old_place: Place) -> tuple[Any, Place]:
    """Return the V1 form of a V0 layer; a layer that is V1 already is returned unchanged."""
    if not old.HasField("layer"):
        return old, old_place
    inner = old_place.child("layer")
    new = _V1(bottom=old.bottom, top=old.top)
    place = old_place.twin({name: old_place.children.get(name, []) for name in ("bottom", "top")})
    kind = old.layer.type
    for descriptor, value in old.layer.ListFields():
        name = descriptor.name
        holder, holder_place, target = new, place, name
        if name == "type":
            if kind not in _V0_TYPES:
                raise DescriptionError(
                    f'{inner.child("type")}: layer "{old.layer.name}" has the unknown V0 type '
                    f'"{kind}"{did_you_mean(kind, _V0_TYPES) or "."}'
                )
            value = _V0_TYPES[kind]
        elif name in _V0_TRANSFORM_FIELDS:
            target = _V0_TRANSFORM_FIELDS[name]
            holder, holder_place = _inside(new, place, "transform_param", inner.child(name))
        else:
            target, params = _V0_FIELDS.get(name, (name, {}))
            if params is not None and kind not in params:
                net.warnings.append(
                    f'{inner.child(name)}: layer "{old.layer.name}" ({kind}) has no use for '
                    f"{name}, which is left out. Remove it."
                )
                continue
            if params is not None:
                holder, holder_place = _inside(new, place, params[kind], inner.child(name))
        _put(holder, target, value)
        holder_place.children[target] = inner.children.get(name, [])
    return new, place


def _inside(layer: Any, place: Place, name: str, made_at: Place) -> tuple[Any, Place]:
    """Return the message `name` of `layer` and its place, made at `made_at` when it is new."""
    if name not in place.children:
        place.add(name, made_at.twin())
    return getattr(layer, name), place.children[name][0]


def _move_transform_fields(layer: Any, place: Place) -> None:
    """Move scale, mean_file, crop_size and mirror of a V1 data layer into `transform_param`."""
    name = _TRANSFORM_HOLDERS.get(layer.type)
    if name is None or not layer.HasField(name):
        return
    old, old_place = getattr(layer, name), place.child(name)
    for field in _TRANSFORM_FIELDS:
        if old.HasField(field):
            new, new_place = _inside(layer, place, "transform_param", old_place.child(field))
            setattr(new, field, getattr(old, field))
            new_place.children[field] = old_place.children.pop(field, [])
            old.ClearField(field)


def _v1_layer(old: Any, place: Place, new: Any) -> None:
    """Fill the layer `new` from the V1 layer `old`; `place` changes with it."""
    for descriptor, value in old.ListFields():
        if descriptor.name == "type":
            new.type = _V1_TYPES[value]
        elif descriptor.name not in _PARAM_SPEC_FIELDS:
            _put(new, descriptor.name, value)
    lists = {name: place.children.pop(name, []) for name in _PARAM_SPEC_FIELDS}
    for name, target in _PARAM_SPEC_FIELDS.items():
        for index, value in enumerate(getattr(old, name)):
            if len(new.param) <= index:
                new.param.add()
                made_at = lists[name][index] if index < len(lists[name]) else place
                place.add("param", made_at.twin())
            setattr(new.param[index], target, value)
            place.children["param"][index].children[target] = lists[name][index : index + 1]


def _upgrade_input(net: Located) -> None:
    """Replace `input` and its sizes by an Input layer at the front.

    Names alone, without sizes, stand in old .caffemodel files and are dropped.
    """
    message, place = net.message, net.place
    names = list(message.input)
    tops, shapes, dims = (
        place.children.pop(name, []) for name in ("input", "input_shape", "input_dim")
    )
    if message.input_shape:
        sizes = [list(shape.dim) for shape in message.input_shape]
        complete = len(sizes) == len(names)
    else:
        sizes = [list(message.input_dim[i : i + 4]) for i in range(0, len(message.input_dim), 4)]
        shapes = [dims[i].twin({"dim": dims[i : i + 4]}) for i in range(0, len(dims), 4)]
        complete = len(message.input_dim) == 4 * len(names)
    start = tops[0] if tops else place
    if not complete and (tops or sizes):
        raise DescriptionError(
            f"{start}: {len(names)} input with {len(message.input_shape)} input_shape and "
            f"{len(message.input_dim)} input_dim, expected one input_shape or four input_dim "
            "for each input."
        )
    if sizes:
        layer = pb.LayerParameter(name="input", type="Input", top=names)
        for dim in sizes:
            layer.input_param.shape.add(dim=dim)
        message.layer.insert(0, layer)
        param_place = start.twin({"shape": shapes})
        layer_place = start.twin({"top": tops, "input_param": [param_place]})
        place.children.setdefault("layer", []).insert(0, layer_place)
    for name in ("input", "input_shape", "input_dim"):
        message.ClearField(name)
