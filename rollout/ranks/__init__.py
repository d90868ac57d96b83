"""The processes that ranks are: how they start, find each other, talk, show that they live, and end."""
