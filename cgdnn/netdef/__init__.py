"""From the text of a net or solver to a checked graph; no shapes, no layer types."""
