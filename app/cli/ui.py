"""`ui`: serves the dashboard on a local port and opens the browser."""

import argparse
import os
import socket

from app.cli import options
from app.cli.clients import PROGRAMS, instructions
from app.cli.parser import CommandParser, whole
from app.server.security import hosts
from app.server.security.access import Access
from app.services.secret import from_environment, secret
from app.store.home import data_dir
from core.errors import MoestroError

FIRST, TRIED = 7860, 100


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--port", type=whole(1, 65535), metavar="N", help=f"port to listen on (default: {FIRST}, or the next free one)"
    )
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: "
        "127.0.0.1, this machine alone; 0.0.0.0: every address of it). Other addresses require a token",
    )
    parser.add_argument(
        "--token",
        type=secret,
        metavar="TOKEN",
        help="require this token (default: $MOESTRO_TOKEN; else none for 127.0.0.1, and a random one for other "
        "addresses)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name that the dashboard may be opened by (may be given more than once)",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let the pages of this site use the API under /v1, for example http://localhost:3000 (may be given more "
        "than once; by default no other site's pages may)",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument(
        "--for",
        dest="program",
        choices=list(PROGRAMS),
        help="print what this program needs to use the model, to be pasted into another terminal",
    )
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    options.spec(args)  # report option errors before anything starts
    token = args.token or from_environment("MOESTRO_TOKEN")
    access = Access.chosen(args.address, token, args.allow_host, args.cors_origin)
    port = choose_port(access.address, args.port)
    from app.store.check import NAME, Check

    check = Check(data_dir() / NAME)  # runs during the remaining imports
    from app.ui.serve import Server, StartOptions, serve

    def ready(server: Server) -> None:
        if args.program is not None:
            lines = instructions(args.program, hosts.urls(access.address, port)[0], server.model, access.token)
            print(f"\nFor {args.program}, in another terminal:\n\n{lines}\n", flush=True)

    browser = not args.no_browser and args.program is None
    try:
        serve(StartOptions(*options.given(args)), access, port=port, browser=browser, ready=ready, check=check)
    except KeyboardInterrupt:
        pass  # the normal end of a dashboard
    return 0


def choose_port(host: str, requested: int | None) -> int:
    """The requested port, or the first free one from 7860 on. Raises MoestroError when taken."""
    if requested is not None:
        if problem := port_problem(host, requested):
            raise MoestroError(
                f"Port {requested} on {host} cannot be used: {problem}. Give another with --port, or leave "
                "--port out and the next free one is taken."
            )
        return requested
    for port in range(FIRST, FIRST + TRIED):
        problem = port_problem(host, port)
        if not problem:
            return port
    raise MoestroError(
        f"No port from {FIRST} to {FIRST + TRIED - 1} on {host} can be used: {problem}. Give one with "
        "--port, and check --address."
    )


def port_problem(host: str, port: int) -> str:
    """Why a server could not listen on this port; "" when it could."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":  # like the server: a port whose last connections are still closing counts as free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""
