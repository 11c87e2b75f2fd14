"""Services behind the page: the loaded model, answers, long jobs, the library, the regret meter. No web or UI code."""
