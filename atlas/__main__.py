"""`python -m atlas`: the `atlas` command"""
from atlas.use.cli import main
if __name__=='__main__':
    main()
