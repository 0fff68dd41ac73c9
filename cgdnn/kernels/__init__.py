"""Arithmetic on arrays: plain functions, compiled behind one task ABI."""
