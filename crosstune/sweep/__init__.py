"""Settings to try: which there are, which comes next, which is given up."""
