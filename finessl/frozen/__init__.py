"""Work on frozen features: encode every image once, solve in seconds, choose what to label."""
