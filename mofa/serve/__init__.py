"""``mofa serve``: the report in a browser of the same machine, with sliders."""
