from finessl.cli import main

main()
