"""How fast is kvreshard, beside what else moves the same bytes? `python -m bench` runs the rows, see `bench/__main__.py`."""
