"""plan"""
def show(a):pass
def check_width(s,w):pass
def count(n):
    return f"{n:,}"
def numbers(clone): return {}
