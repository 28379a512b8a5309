"""Where images come from (sources), whose labels are known (splits), how bytes reach the device (store, loader) and
how they are varied (augment)."""
