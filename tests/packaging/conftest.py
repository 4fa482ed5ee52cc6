"""What a user installs: the sdist and the wheel, each extra alone, and an upgrade in place."""
