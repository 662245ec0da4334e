"""`python -m imagenet_cls`: the console script `imagenet-cls`."""

from imagenet_cls.commands.main import main

if __name__ == "__main__":
    main()
