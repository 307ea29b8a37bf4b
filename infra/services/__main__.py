"""``python -m infra.services up|pool|deploy|undeploy|down|status``."""

from infra.services.commands import main

if __name__ == "__main__":
    main()
