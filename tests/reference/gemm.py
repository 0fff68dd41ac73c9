"""Matrix products by their definition, on arrays of any number of axes."""


def multiply(a, b):
    """Return the product of two matrices, one sum at a time in double precision."""
    return [
        [sum(float(a[i, k]) * float(b[k, j]) for k in range(a.shape[1])) for j in range(b.shape[1])]
        for i in range(a.shape[0])
    ]
