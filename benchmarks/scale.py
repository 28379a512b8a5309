"""How cost grows with the number of images: python benchmarks/scale.py, the same as `finessl bench scale`."""

import sys

from finessl.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "scale"]
    main()
