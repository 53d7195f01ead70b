"""x"""


def parts_of(call):
    return 0, 1


def join(*a):
    pass
