"""Published weights: the trainer writes them, its workers read them."""
