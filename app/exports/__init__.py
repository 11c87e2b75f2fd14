"""What can be taken along: zip files of CSV tables, and traces."""
