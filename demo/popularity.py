"""The order in which facts are chosen and ranked: names that Python programmers ask about first.

Lists, most wanted first: single names, built-in types, modules, classes. The order is an editorial choice; nothing here
is measured.
"""

#: Names asked about most, whatever their module; they take the first ranks.
FIRST_NAMES: tuple[str, ...] = tuple(
    """
    print len range open str.upper list.append dict.get json.dumps json.loads os.path.join collections.deque sorted
    enumerate zip str.split str.join str.format input int str float list dict set tuple map filter sum min max abs
    isinstance type heapq.heappush heapq.heappop collections.Counter collections.defaultdict collections.namedtuple
    re.sub re.match re.search re.findall re.compile random.choice random.shuffle random.randint random.random
    json.load json.dump str.replace str.strip str.lower str.startswith str.endswith str.find list.sort list.extend
    list.pop list.insert list.remove list.index list.reverse dict.items dict.keys dict.values dict.update
    dict.setdefault dict.pop set.add set.union set.intersection math.sqrt math.floor math.ceil
    time.sleep time.time time.perf_counter datetime.datetime datetime.timedelta datetime.datetime.now
    datetime.datetime.strftime datetime.datetime.strptime os.listdir os.getcwd os.makedirs os.mkdir os.remove os.walk
    os.path.exists os.path.basename os.path.dirname os.path.splitext os.path.isfile os.path.isdir os.path.abspath
    pathlib.Path pathlib.Path.exists pathlib.Path.read_text pathlib.Path.write_text pathlib.Path.glob
    pathlib.Path.mkdir pathlib.Path.open shutil.copy shutil.rmtree shutil.move glob.glob subprocess.run
    subprocess.Popen sys.exit itertools.chain itertools.product itertools.permutations itertools.combinations
    itertools.islice itertools.groupby itertools.count itertools.cycle functools.reduce functools.partial
    functools.lru_cache functools.cache functools.wraps any all reversed round pow divmod hash id repr iter next
    getattr setattr hasattr delattr callable super property staticmethod classmethod issubclass vars dir help eval
    exec ord chr hex oct bin bool bytes bytearray complex frozenset object slice copy.copy copy.deepcopy
    pprint.pprint dataclasses.dataclass dataclasses.field enum.Enum contextlib.contextmanager contextlib.suppress
    argparse.ArgumentParser argparse.ArgumentParser.add_argument argparse.ArgumentParser.parse_args csv.reader
    csv.writer csv.DictReader csv.DictWriter logging.getLogger logging.basicConfig threading.Thread threading.Lock
    queue.Queue asyncio.run asyncio.gather asyncio.sleep asyncio.create_task bisect.bisect bisect.insort
    heapq.heapify heapq.nlargest heapq.nsmallest hashlib.sha256 hashlib.md5 base64.b64encode base64.b64decode
    pickle.dumps pickle.loads pickle.dump pickle.load struct.pack struct.unpack statistics.mean statistics.median
    statistics.stdev fractions.Fraction decimal.Decimal string.Template textwrap.dedent textwrap.wrap textwrap.fill
    tempfile.TemporaryDirectory tempfile.NamedTemporaryFile urllib.parse.urlparse urllib.parse.urlencode
    urllib.parse.quote inspect.signature operator.itemgetter operator.attrgetter random.sample random.uniform
    random.seed random.choices re.split re.fullmatch re.escape collections.OrderedDict collections.ChainMap
    uuid.uuid4 zlib.compress difflib.get_close_matches html.escape weakref.ref typing.NamedTuple typing.TypeVar
    """.split()
)

#: Built-in types whose public methods are facts.
BUILTIN_TYPES: tuple[str, ...] = tuple("str list dict set int float tuple bytes".split())

#: Modules, best known first; methods of a module's classes are facts only where `METHODS_OF` names the class.
MODULES: tuple[str, ...] = tuple(
    """
    os os.path sys json re math random datetime time collections itertools functools pathlib subprocess string
    argparse csv logging threading copy shutil typing dataclasses enum contextlib heapq bisect operator asyncio queue
    glob tempfile pickle hashlib base64 urllib.parse textwrap pprint statistics fractions decimal struct zlib inspect
    collections.abc abc io types uuid weakref difflib html unittest traceback secrets calendar getpass platform
    configparser fnmatch shlex zipfile gzip warnings concurrent.futures
    """.split()
)

#: Modules whose purpose is their only fact.
MORE_MODULES: tuple[str, ...] = tuple(
    """
    socket sqlite3 urllib.request http.client http.server email multiprocessing unittest.mock doctest timeit cProfile
    pstats pdb ast dis tokenize keyword importlib pkgutil zipimport tarfile bz2 lzma xml.etree.ElementTree html.parser
    signal selectors select ssl ftplib smtplib imaplib poplib socketserver array ctypes mmap errno locale gettext
    codecs unicodedata stat filecmp fileinput linecache shelve marshal dbm plistlib tomllib netrc hmac binascii
    quopri cmath numbers graphlib sched zoneinfo ipaddress mimetypes webbrowser optparse getopt cmd atexit gc
    tracemalloc faulthandler sysconfig site builtins symtable tabnanny pyclbr py_compile compileall venv zipapp
    resource pwd grp fcntl termios tty pty curses readline rlcompleter copyreg reprlib wsgiref contextvars
    """.split()
)

#: Classes whose public methods are facts.
METHODS_OF: tuple[str, ...] = tuple(
    """
    collections.deque collections.Counter collections.OrderedDict collections.defaultdict datetime.datetime
    datetime.date datetime.timedelta pathlib.Path pathlib.PurePath re.Pattern re.Match threading.Thread
    collections.ChainMap datetime.time random.Random threading.Event threading.Condition threading.Semaphore
    threading.Timer queue.Queue argparse.ArgumentParser logging.Logger logging.Handler string.Template
    string.Formatter subprocess.Popen
    csv.DictWriter csv.Sniffer fractions.Fraction decimal.Decimal json.JSONEncoder json.JSONDecoder
    contextlib.ExitStack asyncio.Queue asyncio.Event
    asyncio.Task asyncio.Lock struct.Struct textwrap.TextWrapper difflib.SequenceMatcher uuid.UUID inspect.Signature
    statistics.NormalDist io.StringIO io.BytesIO weakref.finalize configparser.ConfigParser zipfile.ZipFile
    concurrent.futures.Executor concurrent.futures.Future html.parser.HTMLParser types.MappingProxyType
    """.split()
)
