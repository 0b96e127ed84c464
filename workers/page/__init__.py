"""The cluster's page at the frontend's `/`: what it is fed with, and its files."""
