"""From a graph to tasks: shapes, layouts, partition, dependencies, buffers, checks."""
