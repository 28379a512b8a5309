"""Use a finished run: export it to other formats, serve it, predict for many images."""
