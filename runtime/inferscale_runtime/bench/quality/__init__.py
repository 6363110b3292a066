"""``inferscale bench quality``: what injection does to answers, against text on the same facts."""
