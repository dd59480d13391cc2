"""What tinker's client asks of a server that scores: records, and the questions that wait for their answer."""
