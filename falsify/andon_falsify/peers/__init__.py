"""Training loops that come with the suite as subjects, each written as its library's documentation teaches."""
