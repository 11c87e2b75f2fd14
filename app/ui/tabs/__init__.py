"""The dashboard's tabs, one file each."""
