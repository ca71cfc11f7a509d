"""The backend at run time. Imports torch."""
