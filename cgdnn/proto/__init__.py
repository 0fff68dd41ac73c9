"""Classes generated from proto/cgdnn.proto; its first lines say how."""
