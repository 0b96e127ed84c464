"""The API's requests as clients send them: bodies, their checks, and the errors that answer them."""
