//! Checks documents and sources: the tests that docs/host_api.md and docs/device_api.md name exist,
//! every name of other host APIs and of NCCL's headers for kernels is there, what docs/gemm.md
//! quotes is in the kernels, the list of crates and that of environment variables are complete,
//! links lead to files and headings, workflows of forges are pinned, and lines have at most 100
//! columns.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use devcomm_locate::{NcclPart, NcclVersion, find_nccl};

/// The version of NCCL whose headers docs/device_api.md compares.
const NCCL: NcclVersion = NcclVersion { major: 2, minor: 32, patch: 3 };

/// A Rust source file: the stem of its name, and its text.
type Source = (String, String);

/// Adds all Rust sources below a folder.
fn sources(folder: &Path, into: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, into);
        } else if let Some(stem) = name.strip_suffix(".rs") {
            // The `main.rs` of a test program has the name of its folder.
            let folder = path.parent().and_then(Path::file_name).unwrap_or_default();
            let stem = if stem == "main" { &folder.to_string_lossy() } else { stem };
            into.push((stem.to_owned(), fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Returns whether a source has a test of this name: a function, or a name in a macro or in a list
/// of libtest-mimic trials.
fn has_test(source: &str, test: &str) -> bool {
    let forms = [
        format!("fn {test}("),
        format!(" {test},"),
        format!(" {test};"),
        format!(" {test}:"),
        format!("({test}:"),
        format!("\"{test}\""),
    ];
    source.contains(test) && forms.iter().any(|form| source.contains(form))
}

/// Returns the rows of a document's tables, without headers, each with the test names in its last
/// cell.
fn rows_with_tests(document: &str) -> Vec<(String, Vec<String>)> {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(document);
    let text = fs::read_to_string(text).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| tests |"));
    let is_test = |name: &&str| {
        let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
        name.chars().all(letters)
    };
    rows.map(|row| {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        let names = cell.split(", ").filter_map(|name| name.strip_prefix('`')?.strip_suffix('`'));
        (row.to_owned(), names.filter(is_test).map(str::to_owned).collect())
    })
    .collect()
}

fn all_sources() -> Vec<Source> {
    let mut all = Vec::new();
    sources(Path::new(env!("CARGO_MANIFEST_DIR")), &mut all);
    all
}

/// rustfmt does not wrap comments, strings and macros. Generated files are checked too: `cargo
/// xtask raw` wraps them.
#[test]
fn lines_of_sources_have_at_most_100_columns() {
    let mut long = Vec::new();
    for (stem, text) in all_sources() {
        let lines = text.lines().filter(|line| line.chars().count() > 100);
        long.extend(lines.map(|line| format!("{stem}.rs: {}", line.trim())));
    }
    assert!(long.is_empty(), "wrap these lines:\n{}", long.join("\n"));
}

#[test]
fn every_test_that_the_table_of_the_host_api_names_exists() {
    let sources = all_sources();
    let tests: Vec<String> =
        rows_with_tests("host_api.md").into_iter().flat_map(|(_, tests)| tests).collect();
    for test in &tests {
        // What must not compile is a file of `tests/ui`.
        let found = |(stem, text): &Source| stem == test || has_test(text, test);
        assert!(sources.iter().any(found), "{test} does not exist");
    }
    assert!(
        tests.len() >= 80,
        "only {} tests were found: did the table's form change?",
        tests.len()
    );
}

/// The names of other host APIs are those of the list, in its order, and a row that is not equal
/// has a reason. The names that devcomm has exist in the sources.
#[test]
fn every_name_of_the_other_host_apis_has_a_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names = fs::read_to_string(root.join("tests/host_api_names.txt")).unwrap();
    let names: Vec<&str> =
        names.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let document = fs::read_to_string(root.join("docs/host_api.md")).unwrap();
    let (_, table) = document.split_once("\n## Name by name\n").unwrap();
    let (table, _) = table.split_once("\n## ").unwrap_or((table, ""));
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"))
        .map(|row| row.split(" | ").collect())
        .collect();
    let found: Vec<&str> = rows.iter().map(|row| row[0].trim_end_matches('`')).collect();
    assert_eq!(found, names);
    assert_eq!(names.len(), 156);

    let mut code = Vec::new();
    for folder in ["host/src", "crates/types/src", "crates/sys/src"] {
        sources(&root.join(folder), &mut code);
    }
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let words: BTreeSet<&str> =
        code.iter().flat_map(|(_, text)| text.split(|c: char| !word(c))).collect();
    for row in &rows {
        let [_, here, verdict] = row[..] else { panic!("{row:?}") };
        assert!(!verdict.is_empty() && (verdict != "equal" || here != "-"), "{row:?}");
        for quoted in here.split('`').skip(1).step_by(2) {
            let unknown = quoted.split(|c: char| !word(c)).find(|part| !words.contains(part));
            assert_eq!(unknown, None, "{row:?} names what does not exist");
        }
    }
    let equal = rows.iter().filter(|row| row[2] == "equal").count();
    assert!(equal >= 151, "only {equal} names are equal");
    assert!(table.contains(&format!("{equal} are equal")), "{equal} are equal");
}

#[test]
fn every_row_of_the_device_api_names_tests_that_exist_in_their_files() {
    let sources = all_sources();
    let rows = rows_with_tests("device_api.md");
    for (row, tests) in &rows {
        assert!(!tests.is_empty() || row.contains("| not offered |"), "no test in: {row}");
        for test in tests {
            let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("no file: {test}"));
            let found = |(stem, text): &Source| stem == file && has_test(text, name);
            assert!(sources.iter().any(found), "{test} does not exist");
        }
    }
    assert!(rows.len() >= 70, "only {} rows were found: did the table's form change?", rows.len());
}

/// Returns the folder of NCCL's headers for kernels.
fn device_headers() -> Option<PathBuf> {
    let tree = find_nccl(None, NcclPart::Headers, |tree| match tree.version {
        Some(NCCL) => Ok(()),
        _ => Err(format!("its headers are not those of {NCCL}")),
    });
    let tree = tree.inspect_err(|error| eprintln!("SKIPPED: {error}")).ok()?;
    Some(tree.include?.join("nccl_device"))
}

/// Returns C++ without comments and without the preprocessor's lines.
fn without_comments(source: &str) -> String {
    let mut code = String::new();
    let mut rest = source;
    while let Some(start) = rest.find('/') {
        let (before, comment) = rest.split_at(start);
        code += before;
        let end = if comment.starts_with("//") {
            comment.find('\n')
        } else if comment.starts_with("/*") {
            comment.find("*/").map(|end| end + 2)
        } else {
            code.push('/');
            Some(1)
        };
        rest = &comment[end.unwrap_or(comment.len())..];
    }
    code += rest;
    let mut continues = false;
    let lines = code.lines().filter(|line| {
        let directive = continues || line.trim_start().starts_with('#');
        continues = directive && line.ends_with('\\');
        !directive
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the names that C++ code uses: those with NCCL's prefix, and those that are called or
/// declared as functions.
fn names_in(code: &str) -> BTreeSet<&str> {
    const KEYWORDS: [&str; 9] =
        ["alignas", "asm", "decltype", "for", "if", "return", "sizeof", "volatile", "while"];
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut names = BTreeSet::new();
    let mut rest = code;
    while let Some(start) = rest.find(word) {
        let text = &rest[start..];
        let (name, after) = text.split_at(text.find(|c| !word(c)).unwrap_or(text.len()));
        rest = after;
        let prefixed = name.strip_prefix("nccl").is_some_and(|rest| {
            rest.starts_with(|c: char| c.is_ascii_uppercase()) && !rest.ends_with("_internal")
        });
        let function = after.trim_start().starts_with('(')
            && name.starts_with(|c: char| c.is_ascii_lowercase())
            && !KEYWORDS.contains(&name);
        if prefixed || function {
            names.insert(name);
        }
    }
    names
}

/// A name is in the document, in the lists of `raw`, or in the host's crates. For `ncclGin_X` the
/// document may say `X`, and for `ncclX_t`, C's name of a type, `ncclX`.
#[test]
fn every_name_of_nccls_headers_for_kernels_is_bound_or_marked() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = fs::read_to_string(root.join("docs/device_api.md")).unwrap();
    assert!(document.contains(&format!("`nccl_device/*.h` of NCCL {NCCL}")));
    let Some(headers) = device_headers() else { return };

    let mut code = Vec::new();
    for folder in ["crates/nccl_device/src/raw", "crates/types/src", "crates/sys/src", "host/src"] {
        sources(&root.join(folder), &mut code);
    }
    let native = root.join("crates/nccl_device/src/raw/native.md");
    let texts = [document, fs::read_to_string(native).unwrap()];
    let texts = texts.iter().chain(code.iter().map(|(_, text)| text));
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let known: BTreeSet<&str> = texts.flat_map(|text| text.split(|c: char| !word(c))).collect();

    let (mut found, mut unknown) = (0, Vec::new());
    for entry in fs::read_dir(headers).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        // Folders are NCCL's implementation, and utility.h is for it.
        if !file.ends_with(".h") || file == "utility.h" {
            continue;
        }
        let code = without_comments(&fs::read_to_string(&path).unwrap());
        for name in names_in(&code) {
            found += 1;
            let short = name.strip_prefix("ncclGin_").unwrap_or(name);
            let untyped = name.strip_suffix("_t").unwrap_or(name);
            if [name, short, untyped].iter().all(|name| !known.contains(name)) {
                unknown.push(format!("{file}: {name}"));
            }
        }
    }
    assert!(unknown.is_empty(), "docs/device_api.md does not have:\n{}", unknown.join("\n"));
    assert!(found >= 350, "only {found} names were found: did the headers' form change?");
}

#[test]
fn names_are_found_in_declarations_and_not_in_comments() {
    let code = "/* ncclOld( */ struct ncclThing; // ncclGone()\n#define ncclMacro(x) \\\n more(x)\n\
                int a = b / 2; void put(ncclTeam t, int peer); struct ncclThing_internal; if (x)";
    let code = without_comments(code);
    assert_eq!(names_in(&code), BTreeSet::from(["ncclTeam", "ncclThing", "put"]));
    assert!(code.contains("b / 2"));
}

#[test]
fn the_manifests_of_the_guide_are_those_of_a_new_project() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let template: String = ["Cargo.toml.liquid", "kernels/Cargo.toml.liquid"]
        .map(|name| fs::read_to_string(root.join("template").join(name)).unwrap())
        .concat();
    let template = template.replace("{{project-name}}", "my-sums");
    let chapter = fs::read_to_string(root.join("docs/guide/src/project.md")).unwrap();
    let listings = chapter.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut found = 0;
    for line in listings.flat_map(str::lines) {
        let line = line.split(" #").next().unwrap_or_default().trim();
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        // A dependency that most projects do not need is a comment there.
        let is_there = template.lines().any(|other| other.trim_start_matches("# ") == line);
        assert!(is_there, "the template does not have: {line}");
        found += 1;
    }
    assert!(found >= 20, "only {found} lines were found: did the chapter's form change?");
}

/// A quotation begins with the name of its file. Parts of the file follow, with `// ...` between.
#[test]
fn what_the_chapter_on_products_quotes_is_in_the_kernels() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("examples/gemm_ladder/kernels/src");
    let lines = |text: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.trim().to_owned());
        lines.filter(|line| !line.is_empty()).collect()
    };
    let mut quoted = BTreeSet::new();
    let chapter = fs::read_to_string(root.join("docs/gemm.md")).unwrap();
    for quotation in chapter.split("```rust\n// ").skip(1) {
        let (quotation, _) = quotation.split_once("```").unwrap();
        let (file, parts) = quotation.split_once('\n').unwrap();
        let source = lines(&fs::read_to_string(folder.join(file)).unwrap());
        for part in parts.split("// ...\n") {
            let part = lines(part);
            let found = source.windows(part.len()).any(|lines| lines == part);
            assert!(found, "{file} does not have:\n{}", part.join("\n"));
        }
        quoted.insert(file.to_owned());
    }
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let steps: BTreeSet<String> = files
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name.starts_with("step"))
        .collect();
    assert_eq!(quoted, steps, "the chapter quotes every step");
}

/// Adds the manifests of packages (`Cargo.toml`) below a folder.
fn manifests(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            manifests(&path, into);
        } else if name == "Cargo.toml" {
            into.push(path);
        }
    }
}

#[test]
fn the_list_of_crates_has_every_package() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let design = fs::read_to_string(root.join("docs/design.md")).unwrap();
    let (_, list) = design.split_once("| folder | package |").unwrap();
    let rows = list.lines().skip(2).take_while(|line| line.starts_with('|'));
    let listed: BTreeSet<(String, String)> = rows
        .map(|row| {
            let cells: Vec<&str> = row.trim_matches(['|', ' ']).split(" | ").collect();
            (cells[0].trim_matches('`').to_owned(), cells[1].to_owned())
        })
        .collect();

    let mut found = Vec::new();
    manifests(root, &mut found);
    let packages: BTreeSet<(String, String)> = found
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path).unwrap();
            let (_, package) = text.split_once("[package]").unwrap();
            let name = package.lines().find_map(|line| line.strip_prefix("name = ")).unwrap();
            let folder = path.parent().unwrap().strip_prefix(root).unwrap();
            let folder = folder.to_str().filter(|folder| !folder.is_empty()).unwrap_or(".");
            (folder.to_owned(), name.trim_matches('"').to_owned())
        })
        .collect();
    assert_eq!(listed, packages);
    assert!(packages.len() > 25, "{packages:?}");
}

/// Returns the words that begin with `DEVCOMM_`.
fn variables(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("DEVCOMM_") && !word.ends_with('_')).collect()
}

/// Variables that are not for users: of tests, and between devcomm's own processes.
const INTERNAL: [&str; 11] = [
    "DEVCOMM_BENCH_PEER",
    "DEVCOMM_KERNELS_PROBLEM",
    "DEVCOMM_LINK_JOB",
    "DEVCOMM_LISTENER",
    "DEVCOMM_ORIGINALS",
    "DEVCOMM_RANK",
    "DEVCOMM_TEST_CHILD",
    "DEVCOMM_TEST_DUMP",
    "DEVCOMM_TEST_FETCH",
    "DEVCOMM_TEST_KERNELS",
    "DEVCOMM_TEST_SOCKET",
];

#[test]
fn the_list_of_environment_variables_is_that_of_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = fs::read_to_string(root.join("docs/environment.md")).unwrap();
    let listed = variables(&document);

    let mut code = Vec::new();
    for folder in ["host/src", "bench/src", "xtask/src", "python/src"] {
        sources(&root.join(folder), &mut code);
    }
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut code);
    }
    let package = fs::read_to_string(root.join("python/package/devcomm/__init__.py")).unwrap();
    let texts = code.iter().map(|(_, text)| text).chain([&package]);
    let all: BTreeSet<&str> = texts.flat_map(|text| variables(text)).collect();
    // Only tests read DEVCOMM_BLESS, and their folders are not searched.
    let absent: Vec<&&str> =
        listed.iter().filter(|name| **name != "DEVCOMM_BLESS" && !all.contains(*name)).collect();
    assert!(absent.is_empty(), "no source reads {absent:?}");

    let quoted: BTreeSet<&str> = code
        .iter()
        .filter(|(_, text)| !text.contains("\n#[test]"))
        .flat_map(|(_, text)| text.split('"').filter(|part| part.starts_with("DEVCOMM_")))
        .filter(|part| variables(part).contains(part))
        .collect();
    let unlisted: Vec<&str> = quoted
        .into_iter()
        .filter(|name| !listed.contains(name) && !INTERNAL.contains(name))
        .collect();
    assert!(unlisted.is_empty(), "docs/environment.md does not have {unlisted:?}");
    assert!(listed.len() > 25, "{listed:?}");
}

/// Returns a heading's anchor on a forge.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || "_- ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Returns a document without its code blocks.
fn prose(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// Returns the number of a document's links to files and headings, and those that lead nowhere.
fn links(document: &Path, text: &str) -> (usize, Vec<String>) {
    let text = prose(text);
    let links = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    let links: Vec<&str> = links.filter(|link| !link.contains("://")).collect();
    let leads_nowhere = |link: &&&str| {
        let (file, heading) = link.split_once('#').unwrap_or((link, ""));
        let own = file.is_empty().then(|| document.to_owned());
        let target = own.unwrap_or_else(|| document.parent().unwrap().join(file));
        let has_heading = || {
            let text = prose(&fs::read_to_string(&target).unwrap());
            text.lines().any(|line| line.starts_with('#') && anchor(line) == heading)
        };
        let is_document = target.extension().is_some_and(|kind| kind == "md");
        !target.exists() || (!heading.is_empty() && is_document && !has_heading())
    };
    let broken = links.iter().filter(leads_nowhere);
    let broken = broken.map(|link| format!("{}: {link}", document.display())).collect();
    (links.len(), broken)
}

#[test]
fn every_link_of_the_documents_leads_to_a_file_and_a_heading() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders =
        ["", "docs", "docs/lab", "docs/guide/src", "bench", "crates/cli", "python", "template"];
    let (mut found, mut broken) = (0, Vec::new());
    for entry in folders.iter().flat_map(|folder| fs::read_dir(root.join(folder)).unwrap()) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "md") {
            let (number, wrong) = links(&path, &fs::read_to_string(&path).unwrap());
            found += number;
            broken.extend(wrong);
        }
    }
    assert!(broken.is_empty(), "these links lead nowhere:\n{}", broken.join("\n"));
    assert!(found >= 100, "{found}");
}

#[test]
fn links_to_files_and_headings_that_are_not_there_are_found() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let text = "[a](docs/design.md) [b](https://x.org/y) [c](gone.md) [d](docs/model.md#gone)";
    let (found, broken) = links(&readme, text);
    assert_eq!(found, 3);
    assert!(broken.len() == 2 && broken.iter().all(|link| link.contains("gone")), "{broken:?}");
}

/// An action's tag can be moved to other code, which has the permissions of the job's token.
#[test]
fn actions_of_workflows_are_pinned_by_hash_and_only_read() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for workflow in [".github/workflows/ci.yml", "template/.github/workflows/ci.yml"] {
        let text = fs::read_to_string(root.join(workflow)).unwrap();
        assert!(text.contains("\npermissions:\n  contents: read\n"), "{workflow}");
        let mut actions = 0;
        for action in text.split("uses: ").skip(1) {
            let (_, version) = action.lines().next().unwrap().split_once('@').unwrap();
            let hash = version.split(' ').next().unwrap();
            let is_hash = hash.len() == 40 && hash.chars().all(|c| c.is_ascii_hexdigit());
            assert!(is_hash, "{workflow}: {version}");
            actions += 1;
        }
        assert!(actions > 0, "{workflow}");
    }
}
