"""Objects in buckets, files on web servers, and repositories of the Hugging Face hub: locations, clients, reads."""
