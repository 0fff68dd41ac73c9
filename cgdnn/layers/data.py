"""Layers that read records from files, on a background thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from cgdnn.data.cursor import BatchSource
from cgdnn.data.database import DatumSource
from cgdnn.data.hdf5 import HDF5Source
from cgdnn.data.prefetch import Prefetcher
from cgdnn.data.transform import Transform
from cgdnn.errors import DataError
from cgdnn.kernels.random import uniform_u32
from cgdnn.layers._base import Count, DataLayer, Operands, Shape, Step, write_all
from cgdnn.netdef.read import find_file
from cgdnn.proto.cgdnn_pb2 import DataParameter, TransformationParameter


class _BatchLayer(DataLayer):
    """A data layer over a `BatchSource`: a subclass opens the source and knows its own fields."""

    _field: ClassVar[str]
    _depth = 4

    def setup(self) -> None:
        """Read the batch size and the source's name."""
        param = getattr(self.node.param, self._field)
        for name in ("source", "batch_size"):
            if not getattr(param, name):
                raise self.error(
                    f"{name} is missing, expected {_EXPECTED[name]}. Add it.", self._field
                )
        self._batch_size = int(param.batch_size)
        self._path = find_file(param.source, self.node.source.filename)
        self._source: BatchSource | None = None
        self._prefetcher: Prefetcher | None = None
        self._key = 0
        self._position = 0

    def _open(self, draw: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.uint64]]) -> Any:
        raise NotImplementedError

    def _shape_without_data(self) -> Shape | None:
        """Return the shape of a sample as far as the description tells it."""
        return None

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Open the source and return the shapes of its batches."""
        if self.without_data:
            return self._declared_shapes()
        try:
            self._source = self._open(lambda stream, index: uniform_u32(self._key, stream, index))
        except DataError as error:
            raise self._named(error) from error
        self.warnings += self._source.warnings
        return [tuple(shape) for shape in self._source.shapes]

    def _declared_shapes(self) -> list[Shape]:
        sample = self.shape_hint or self._shape_without_data()
        if sample is None:
            name = self.node.param.top[0]
            raise self.error(
                f'the shape of "{name}" is not known without its data; got no crop_size, expected '
                f"the shape of one sample. Give --shape {name}=3,227,227 with the right numbers."
            )
        batch = (self._batch_size,)
        return [(*batch, *sample), *([batch] * (len(self.node.tops) - 1))]

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that copies the next batch into the tops."""
        self._key = operands.key
        return [Step(self._copy_batch, [write_all(top) for top in operands.top])]

    def _copy_batch(self, *tops: npt.NDArray[Any]) -> None:
        if self._prefetcher is None:
            assert self._source is not None, "a net without data cannot run"
            self._prefetcher = Prefetcher(self._source, tops[0].dtype, self._depth)
            self._prefetcher.seek(self._position + self._skipped())
        try:
            batch = self._prefetcher.next()
        except DataError as error:
            raise self._named(error) from error
        for top, array in zip(tops, batch, strict=True):
            top[...] = array
        self._prefetcher.release()
        self._position += self._batch_size

    def _named(self, error: DataError) -> DataError:
        """Return the error with the layer's name and place in it."""
        if self.node.label in str(error):
            return error
        return DataError(f"{self.node.at(self._field, 'source')}: {self.node.label}: {error}")

    def _skipped(self) -> int:
        """Return how many records lie before position 0."""
        return 0

    @property
    def position(self) -> int:
        """Records consumed by the forward passes so far."""
        return self._position

    @property
    def records(self) -> int:
        """Records that the source holds; an epoch."""
        assert self._source is not None, "a net without data has no records"
        return self._source.entries

    @property
    def batch_size(self) -> int:
        """Records that one forward pass consumes."""
        return self._batch_size

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that records have taken so far, by stage; last "wait", of forward passes."""
        assert self._source is not None, "a net without data reads no records"
        waited = 0.0 if self._prefetcher is None else self._prefetcher.waited
        return {**self._source.seconds, "wait": waited}

    def seek(self, position: int) -> None:
        """Let the next forward pass begin after `position` records."""
        self._position = position
        if self._prefetcher is not None:
            self._prefetcher.seek(position + self._skipped())

    def close(self) -> None:
        """Stop reading ahead and close the files."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        elif self._source is not None:
            self._source.close()

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return no step."""
        return []


_MOVED_FIELDS: tuple[Literal["scale", "mean_file", "crop_size", "mirror"], ...] = (
    "scale",
    "mean_file",
    "crop_size",
    "mirror",
)
_EXPECTED = {"source": "the name of what to read", "batch_size": "the number of records of a batch"}


class Data(_BatchLayer):
    """Read pictures (top 0) and labels (top 1, optional) from an LMDB of Datum records.

    Records come in the order of their keys, and wrap at the end. A background thread reads,
    decodes and transforms them.

    Fields of ``data_param``: ``source``, looked up from the working directory, then from the
    description's folder; ``batch_size``; ``backend`` (what the files are decides; LevelDB is not
    read); ``prefetch`` (default 4), batches to keep ready; ``rand_skip``: start at a random record
    below this number; ``force_encoded_color``: decode pictures as colour. Of ``transform_param``:
    ``scale``, ``mirror``, ``crop_size`` (random in TRAIN, central in TEST), ``mean_file`` or
    ``mean_value``, ``force_color``, ``force_gray``. The same fields inside ``data_param`` are heard
    in a V1 layer only, as in Caffe, and draw a warning elsewhere (Caffe, data_layer.cpp and
    data_transformer.cpp).

    Random numbers depend on the seed, the layer's name and the record's position, so a resumed run
    draws the same ones.
    """

    tops: ClassVar[Count] = Count(1, 2)
    _field = "data_param"

    def setup(self) -> None:
        """Read the fields."""
        super().setup()
        self._depth = max(1, self.node.param.data_param.prefetch)
        self._param = TransformationParameter()
        self._param.CopyFrom(self.node.param.transform_param)
        if self.node.param.data_param.force_encoded_color:
            self._param.force_color = True
        for name in _MOVED_FIELDS:
            if self.node.param.data_param.HasField(name):
                self.warnings.append(
                    f"{self.node.at('data_param', name)}: {self.node.label}: {name} inside "
                    "data_param has no effect. Move it to transform_param."
                )

    def _open(self, draw: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.uint64]]) -> Any:
        param = self.node.param.data_param
        mean = find_file(self._param.mean_file, self.node.source.filename)

        def where(field: str) -> str:
            return f"{self.node.at('transform_param', field)}: {self.node.label}"

        return DatumSource(
            self._path,
            DataParameter.DB.Name(param.backend),
            self._batch_size,
            Transform(self._param, mean, where),
            self.phase,
            draw,
            len(self.node.tops) > 1,
        )

    def _shape_without_data(self) -> Shape | None:
        crop = self._param.crop_size
        if not crop:
            return None
        channels = 1 if self._param.force_gray else 3
        if len(self._param.mean_value) > 1:
            channels = len(self._param.mean_value)
        else:
            self.warnings.append(f"{self.node.label}: taking {channels} channel(s), without data.")
        return (channels, crop, crop)

    def _skipped(self) -> int:
        limit = self.node.param.data_param.rand_skip
        return int(uniform_u32(self._key, -1, 0)[0]) % limit if limit else 0


class HDF5Data(_BatchLayer):
    """Read rows from HDF5 files: each top is the dataset of its name.

    Fields of ``hdf5_data_param``: ``source``, a text file that lists HDF5 files, looked up from
    the working directory, then from the description's folder; ``batch_size``; ``shuffle``: files,
    and rows within files, in another order in every pass. Batches run across the borders of files
    and wrap at the end (Caffe, hdf5_data_layer.cpp).

    The order depends on the seed, the layer's name and the position, so a resumed run sees the
    same one. Data is not transformed: ``transform_param`` is refused.
    """

    tops: ClassVar[Count] = Count(1, None)
    _field = "hdf5_data_param"

    def setup(self) -> None:
        """Read the fields."""
        super().setup()
        if self.node.param.HasField("transform_param"):
            raise self.error(
                "data is not transformed; got transform_param, expected none. Transform the data "
                "when writing the HDF5 files, and remove transform_param.",
                "transform_param",
            )

    def _open(self, draw: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.uint64]]) -> Any:
        return HDF5Source(
            self._path,
            list(self.node.param.top),
            self._batch_size,
            self.node.param.hdf5_data_param.shuffle,
            draw,
        )
