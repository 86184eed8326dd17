"""retrieve: finding and ranking documents, such as ``grank``, which needs no server."""
