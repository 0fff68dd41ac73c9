"""cgdnn: train convolutional networks on multicore CPUs from Caffe's network descriptions."""
