"""Layers and remotes behind the local cache: directories, HTTP servers, Redis, object stores."""
