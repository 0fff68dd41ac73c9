"""Layers of Caffe: shapes, parameters and steps; found by their classes, one file per family."""
