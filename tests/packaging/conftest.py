"""Promise: sdist and wheel install, each extra works alone, and an upgrade keeps all data."""
