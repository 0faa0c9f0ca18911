"""kcache and what it is compared with, behind one interface."""
