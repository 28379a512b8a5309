"""Programs that are copied next to an export. They need no finessl."""
