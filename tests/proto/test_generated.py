from pathlib import Path

import pytest

from cgdnn.proto import cgdnn_pb2 as pb

ROOT = Path(__file__).parents[2]


def test_generated_classes_are_those_of_the_source(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    described = tmp_path / "cgdnn.bin"
    source = ROOT / "proto" / "cgdnn.proto"
    arguments = ["protoc", f"-Icgdnn/proto={source.parent}", f"--descriptor_set_out={described}"]
    assert protoc.main([*arguments, str(source)]) == 0
    expected = FileDescriptorSet.FromString(described.read_bytes()).file[0]
    generated = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(generated)
    assert str(_without_json_names(generated)) == str(_without_json_names(expected))


def _without_json_names(description):
    for message in description.message_type:
        for field in message.field:
            field.ClearField("json_name")
            field.ClearField("default_value")  # runtimes print the same float differently
        for nested in message.nested_type:
            for field in nested.field:
                field.ClearField("json_name")
    for extension in description.extension:
        extension.ClearField("json_name")
    return description


@pytest.mark.parametrize(
    ("message", "default"),
    [
        (pb.SolverParameter().delta, 1e-8),
        (pb.SolverParameter().clip_gradients, -1),
        (pb.BatchNormParameter().moving_average_fraction, 0.999),
        (pb.LRNParameter().local_size, 5),
        (pb.FillerParameter().type, "constant"),
        (pb.PoolingParameter().round_mode, pb.PoolingParameter.CEIL),
        (pb.SolverParameter().solver_mode, pb.SolverParameter.GPU),
        (pb.DataParameter().backend, pb.DataParameter.LEVELDB),
    ],
)
def test_defaults_are_caffes(message, default):
    assert message == pytest.approx(default) if isinstance(default, float) else message == default


def test_wire_form_is_caffes():
    # Field 100 (layer), length 8: name "c" (1), type "ReLU" is left out; loss_weight (5) 1.0.
    net = pb.NetParameter(layer=[pb.LayerParameter(name="c", loss_weight=[1.0])])
    assert net.SerializeToString() == b"\xa2\x06\x08\x0a\x01c\x2d\x00\x00\x80\x3f"
    blob = pb.BlobProto(data=[1.0], shape=pb.BlobShape(dim=[1]))
    assert blob.SerializeToString() == b"\x2a\x04\x00\x00\x80\x3f\x3a\x03\x0a\x01\x01"


def test_readers_without_the_extension_keep_a_state_readable():
    state = pb.SolverState(iter=3, learned_net="x")
    state.Extensions[pb.cgdnn_resume].seed = 7
    data = state.SerializeToString()
    # The extension is one unknown field, number 1000 of type length-delimited, at the end.
    assert data.endswith(b"\xc2\x3e\x02\x08\x07")
