"""What a run leaves for people and programs: tables, files, metrics, figures."""
