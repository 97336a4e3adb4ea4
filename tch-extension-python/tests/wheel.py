import tch_extension
print(tch_extension.__version__)
