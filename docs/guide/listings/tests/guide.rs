//! The guide itself: its listings are copies of files that are compiled, its links lead somewhere,
//! the names in its tables exist, and its pictures are those that the program draws. The tests
//! also assert that they find about as many listings and names as there are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the folder `docs/guide/src`.
fn book() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../src")
}

/// Returns every page: its name and its text.
fn pages() -> Vec<(String, String)> {
    let entries = fs::read_dir(book()).unwrap().map(|entry| entry.unwrap().path());
    let pages = entries.filter(|path| path.extension().is_some_and(|kind| kind == "md"));
    let page = |path: PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(path).unwrap())
    };
    pages.map(page).collect()
}

/// Returns what a listing shows: a file, or the lines between two marks, without their common
/// indentation. The path is relative to `folder`.
fn source(folder: &Path, what: &str) -> String {
    let (file, anchor) = what.split_once(':').map_or((what, None), |(f, a)| (f, Some(a)));
    let text = fs::read_to_string(folder.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let lines: Vec<&str> = text.lines().collect();
    let Some(anchor) = anchor else { return lines.join("\n") };
    let line_of = |mark: &str| {
        let is_mark = |line: &&str| line.trim().strip_prefix("// ") == Some(mark);
        assert_eq!(lines.iter().filter(|line| is_mark(line)).count(), 1, "`// {mark}` in {file}");
        lines.iter().position(is_mark).unwrap()
    };
    let first = line_of(&format!("ANCHOR: {anchor}")) + 1;
    let lines = &lines[first..line_of(&format!("ANCHOR_END: {anchor}"))];
    let indents = lines.iter().filter(|line| !line.is_empty());
    let indent = indents.map(|line| line.len() - line.trim_start().len()).min().unwrap_or(0);
    let lines: Vec<&str> = lines.iter().map(|line| line.get(indent..).unwrap_or("")).collect();
    lines.join("\n")
}

/// A mark in a page: the next block is a copy of what it names.
const LISTING: &str = "<!-- listing ";

/// Returns a page with the listings that its marks name.
fn with_listings(folder: &Path, text: &str) -> String {
    let mut parts = text.split(LISTING);
    let mut page = parts.next().unwrap().to_owned();
    for part in parts {
        let (what, block) = part.split_once(" -->\n```").unwrap_or_else(|| panic!("{part}"));
        let (language, block) = block.split_once('\n').unwrap();
        let (_, after) = block.split_once("\n```\n").unwrap_or_else(|| panic!("{what}: no end"));
        let code = source(folder, what);
        page += &format!("{LISTING}{what} -->\n```{language}\n{code}\n```\n{after}");
    }
    page
}

/// Copies the listings into the pages instead if `DEVCOMM_BLESS=1`.
#[test]
fn the_listings_are_those_of_their_files() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../README.md");
    let pages = pages().into_iter().map(|(name, _)| book().join(name)).chain([readme]);
    for path in pages {
        let text = fs::read_to_string(&path).unwrap();
        let expected = with_listings(path.parent().unwrap(), &text);
        if text != expected && std::env::var_os("DEVCOMM_BLESS").is_some() {
            fs::write(&path, expected).unwrap();
        } else {
            assert_eq!(text, expected, "DEVCOMM_BLESS=1 writes {}", path.display());
        }
    }
}

#[test]
fn every_listing_in_rust_is_a_part_of_a_file_that_is_compiled() {
    let mut listings = 0;
    for (page, text) in pages() {
        assert!(!text.contains("{{#"), "{page}: a forge shows no listing that mdBook includes");
        let mut before = "";
        for line in text.lines() {
            if line.starts_with("```rust") {
                assert_eq!(line, "```rust", "{page}: a listing that is not compiled");
                let what = before.strip_prefix(LISTING).and_then(|rest| rest.strip_suffix(" -->"));
                let what = what.unwrap_or_else(|| panic!("{page} has code of its own"));
                assert!(what.contains(".rs"), "{page}: {what} is not compiled");
                assert!(source(&book(), what).lines().count() > 2, "{page}: {what} is empty");
                listings += 1;
            }
            before = line;
        }
    }
    assert!(listings >= 20, "{listings}");
}

/// The README's program is a doctest, in which the kernel has no file of its own.
#[test]
fn the_kernel_of_the_readme_is_that_of_the_report() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let listing = source(&root.join("docs/guide/kernels/src"), "sum_of_all.rs:kernel");
    let (_, kernel) = listing.split_once("\n\n").unwrap();
    let kernel = kernel.replace("pub fn", "fn");
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    assert!(readme.contains(&kernel), "{kernel}");
}

/// GitHub shows the lines that rustdoc hides.
#[test]
fn the_listings_of_the_readme_have_no_hidden_lines() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(here.join("../../../README.md")).unwrap();
    let blocks = readme.split("```rust").skip(1).filter_map(|rest| rest.split("```").next());
    let lines: Vec<&str> = blocks.flat_map(str::lines).collect();
    assert!(lines.len() > 30, "{}", lines.len());
    assert!(!lines.iter().any(|line| line.starts_with("# ")), "{lines:#?}");
}

#[test]
fn the_readme_has_at_most_150_lines() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(here.join("../../../README.md")).unwrap();
    assert!(readme.lines().count() <= 150, "{}", readme.lines().count());
}

/// What a kernel file has between its anchors is shown.
#[test]
fn every_anchor_is_shown() {
    let guide: String = pages().into_iter().map(|(_, text)| text).collect();
    for folder in ["kernels/src", "listings/src", "listings/tests", "listings/tests/gpu_guide"] {
        for entry in fs::read_dir(book().join("..").join(folder)).unwrap() {
            let path = entry.unwrap().path();
            // This file, `guide.rs`, has the marks in its strings.
            if path.extension().is_none_or(|kind| kind != "rs") || path.ends_with("guide.rs") {
                continue;
            }
            let file = path.file_name().unwrap().to_string_lossy().into_owned();
            for line in fs::read_to_string(&path).unwrap().lines() {
                let Some(anchor) = line.trim().strip_prefix("// ANCHOR: ") else { continue };
                let shown = format!("{folder}/{file}:{anchor} -->");
                assert!(guide.contains(&shown), "{shown} is in no chapter");
            }
        }
    }
}

#[test]
fn every_page_is_in_the_summary_and_every_link_leads_to_a_file() {
    let pages = pages();
    let (_, summary) = pages.iter().find(|(name, _)| name == "SUMMARY.md").unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    for (page, text) in &pages {
        assert!(page == "SUMMARY.md" || summary.contains(&format!("({page})")), "{page}");
        let prose: String = text.split("```").step_by(2).collect();
        for link in prose.split("](").skip(1) {
            let (link, _) = link.split_once(')').unwrap();
            let repository = "https://github.com/devcomm/devcomm/blob/main/";
            let target = match link.strip_prefix(repository) {
                Some(file) => root.join(file),
                None if link.starts_with("https://") => continue,
                None => book().join(link.split('#').next().unwrap()),
            };
            assert!(target.exists(), "{page}: {link}");
        }
    }
    let titles: BTreeSet<&str> =
        pages.iter().map(|(_, text)| text.lines().next().unwrap()).collect();
    assert_eq!(titles.len(), pages.len(), "each page has a title of its own");
}

#[test]
fn the_manifests_name_packages_of_the_workspace() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let workspace = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let mut names = 0;
    for (page, text) in pages() {
        // A project's own packages have paths.
        let is_ours = |line: &&str| line.contains(" = { package = ") && !line.contains("path = ");
        for line in text.lines().filter(is_ours) {
            let (dependency, _) = line.split_once(", ").unwrap();
            assert!(workspace.contains(dependency), "{page}: {line}");
            names += 1;
        }
    }
    assert!(names >= 4, "{names}");
}

/// Returns the words of all sources of the crates that users see.
fn words() -> BTreeSet<String> {
    fn add(folder: &Path, words: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                add(&path, words);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let text = fs::read_to_string(path).unwrap();
                let parts = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
                words.extend(parts.map(str::to_owned));
            }
        }
    }
    let mut words = BTreeSet::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    for folder in [
        "crates/cuda_std/src",
        "crates/cuda_std_macros/src",
        "crates/nccl_device/src",
        "crates/types/src",
        "crates/cuda_builder/src",
        "host/src",
        "src",
        "crates/ops/src",
    ] {
        add(&root.join(folder), &mut words);
    }
    words
}

/// The last cell of each row of the tables in `porting.md` is devcomm's name.
#[test]
fn every_name_in_the_tables_of_the_porting_chapter_exists() {
    let words = words();
    let text = fs::read_to_string(book().join("porting.md")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let mut names = 0;
    for row in rows {
        let here = row.split(" | ").nth(1).unwrap();
        for quoted in here.split('`').skip(1).step_by(2) {
            for part in quoted.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
                let number = part.chars().all(|c| c.is_ascii_digit());
                assert!(number || words.contains(part), "`{part}` in: {row}");
            }
            names += 1;
        }
    }
    assert!(names >= 60, "{names}");
}

/// Writes the pictures instead if `DEVCOMM_BLESS=1`.
#[test]
fn the_pictures_are_those_that_the_program_draws() {
    let folder = book().join("pictures");
    for (name, drawn) in norm::pictures::all() {
        let path = folder.join(name);
        if std::env::var_os("DEVCOMM_BLESS").is_some() {
            fs::write(path, drawn).unwrap();
            continue;
        }
        let there = fs::read_to_string(&path).unwrap_or_default();
        assert!(there == drawn, "DEVCOMM_BLESS=1 writes {}", path.display());
    }
    // The timeline is drawn by the simulator's tests.
    let known = |name: &str| norm::pictures::all().iter().any(|(of, _)| *of == name);
    for file in fs::read_dir(folder).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(known(&name) || name == "timeline.svg", "no program draws {name}");
    }
}
