"""What setup.py and pip need to build the package from source. Not installed."""
