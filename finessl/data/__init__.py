"""From files to views: sources of images, splits into labeled and unlabeled ones, decoded pixels, loader, augmentation."""
