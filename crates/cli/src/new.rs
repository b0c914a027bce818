//! `devcomm new`: starts a project, from the files in the folder `template`, which cargo-generate
//! can use too.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::MetadataCommand;
use devcomm_locate::quoted;

/// Start a project in a new folder: a package of kernels, a program that launches them, and a test
/// on simulated GPUs
#[derive(Debug, clap::Args)]
pub struct New {
    /// The folder, which must be empty or not exist
    folder: PathBuf,
    /// The name of the package [default: the folder's]
    #[arg(long)]
    name: Option<String>,
    /// Add a matrix product for Hopper GPUs whose kernel also adds it over the GPUs
    #[arg(long)]
    fused: bool,
    /// Take devcomm's crates from this checkout of devcomm instead of the registry
    #[arg(long, value_name = "CHECKOUT")]
    pub crates: Option<PathBuf>,
}

impl New {
    /// Writes the project, and prints what to do next.
    ///
    /// # Errors
    ///
    /// If the folder is not empty or cannot be written, the name cannot be a package's, or the
    /// checkout is not one of devcomm.
    pub fn run(&self) -> Result<u8> {
        let checkout = self.crates.as_deref().map(checkout).transpose()?;
        create(&self.folder, self.name.as_deref(), self.fused)?;
        if let Some((patch, own)) = checkout {
            let install = install_from(&own);
            self.edit("Cargo.toml", |text| text + &patch)?;
            self.edit("README.md", |text| text.replace(INSTALL, &install))?;
        }
        println!(
            "{} has a project:\n  cd {}\n  cargo test\n  DEVCOMM_SIMULATE=2 cargo run\nIts \
             README.md says how to build it for GPUs",
            self.folder.display(),
            quoted(&self.folder.display().to_string())
        );
        Ok(0)
    }

    /// Changes a file of the new project.
    fn edit(&self, file: &str, change: impl FnOnce(String) -> String) -> Result<()> {
        let path = self.folder.join(file);
        let written = fs::read_to_string(&path).and_then(|text| fs::write(&path, change(text)));
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

/// The package of devcomm's compiled kernels.
const KERNELS_BIN: &str = "devcomm-kernels-bin";

/// How the template's README installs this command, from the registry.
const INSTALL: &str = "cargo install devcomm-cli";

/// Returns the command that installs this command from its folder in a checkout.
fn install_from(folder: &str) -> String {
    format!("cargo install --path {}", quoted(folder))
}

/// The template: each file's path and text.
const TEMPLATE: [(&str, &str); 12] = [
    (".github/workflows/ci.yml", include_str!("../template/.github/workflows/ci.yml")),
    (".gitignore", include_str!("../template/.gitignore")),
    (".vscode/settings.json", include_str!("../template/.vscode/settings.json")),
    // A folder with a Cargo.toml is not packaged with the crate around it.
    ("Cargo.toml", include_str!("../template/Cargo.toml.liquid")),
    ("README.md", include_str!("../template/README.md")),
    ("build.rs", include_str!("../template/build.rs")),
    ("kernels/Cargo.toml", include_str!("../template/kernels/Cargo.toml.liquid")),
    ("kernels/src/lib.rs", include_str!("../template/kernels/src/lib.rs")),
    ("kernels/src/sum.rs", include_str!("../template/kernels/src/sum.rs")),
    ("src/lib.rs", include_str!("../template/src/lib.rs")),
    ("src/main.rs", include_str!("../template/src/main.rs")),
    ("tests/sum.rs", include_str!("../template/tests/sum.rs")),
];

/// What a project with a fused product has in addition.
const FUSED: [(&str, &str); 5] = [
    ("examples/fused.rs", include_str!("../template/fused/examples/fused.rs")),
    // The guide shows this file, too.
    ("kernels/src/fused.rs", include_str!("../template/fused/kernels/src/fused.rs")),
    ("rustfmt.toml", include_str!("../template/fused/rustfmt.toml")),
    ("src/fused.rs", include_str!("../template/fused/src/fused.rs")),
    ("tests/fused.rs", include_str!("../template/fused/tests/fused.rs")),
];

/// What a fused product adds to the template's files: the file, the text after which it is added,
/// and the addition.
const WITH_FUSED: [(&str, &str, &str); 4] = [
    ("Cargo.toml", "devcomm = \"0.1\"\n", "half = \"2.4\"\n"),
    ("README.md", "# on two simulated GPUs\n", FUSED_COMMAND),
    ("kernels/src/lib.rs", "#![no_std]\n", "\npub mod fused;\n"),
    ("src/lib.rs", "kernels.\n", "\npub mod fused;\n"),
];

const FUSED_COMMAND: &str =
    "$ cargo run --release --features ptx --example fused   # a fused product on Hopper GPUs\n";

/// Writes a project into `folder`, which has its name unless `name` is given; `fused` adds a fused
/// product. Its manifests name devcomm's crates on the registry.
///
/// # Errors
///
/// If the folder is not empty or cannot be written, or the name cannot be a package's.
pub fn create(folder: &Path, name: Option<&str>, fused: bool) -> Result<()> {
    let absolute = std::path::absolute(folder)?;
    let name = match name {
        Some(name) => name.to_owned(),
        None => absolute.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    };
    check_name(&name)?;
    let is_empty = |folder: &Path| fs::read_dir(folder).is_ok_and(|mut all| all.next().is_none());
    ensure!(
        !folder.exists() || is_empty(folder),
        "{} is not an empty folder; a new project needs one of its own",
        folder.display()
    );
    let added: &[_] = if fused { &FUSED } else { &[] };
    for (path, text) in TEMPLATE.iter().chain(added) {
        let mut text = fill(text, &name);
        for (_, after, more) in WITH_FUSED.iter().filter(|(of, ..)| fused && of == path) {
            text = text.replacen(after, &format!("{after}{more}"), 1);
        }
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap_or(folder))
            .and_then(|()| fs::write(&path, text))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the text with cargo-generate's two placeholders replaced, and without the guide's
/// anchors.
fn fill(text: &str, name: &str) -> String {
    let lines = text.split_inclusive('\n').filter(|line| !line.starts_with("// ANCHOR"));
    let text: String = lines.collect();
    text.replace("{{project-name}}", name).replace("{{crate_name}}", &name.replace('-', "_"))
}

/// Refuses what cargo or rustc refuse as the name of a package and of its library.
fn check_name(name: &str) -> Result<()> {
    const TAKEN: [&str; 13] = [
        "devcomm",
        "kernels",
        "cuda_std",
        "nccl_device",
        "half",
        "core",
        "std",
        "alloc",
        "test",
        // Folders in cargo's target folder.
        "build",
        "deps",
        "examples",
        "incremental",
    ];
    let letters = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.chars().all(letters) || !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        bail!(
            "{name:?} cannot be a package's name: letters, digits, - and _, beginning with a \
             letter; choose one by --name"
        );
    }
    let library = name.replace('-', "_");
    if TAKEN.contains(&library.as_str()) || is_keyword(&library) {
        bail!("{name:?} has another meaning in the project's code; choose a name by --name");
    }
    Ok(())
}

/// Returns whether Rust has this word as a keyword, so that no `use` can name such a library.
fn is_keyword(word: &str) -> bool {
    const KEYWORDS: &str = "Self abstract as async await become box break const continue crate do \
                            dyn else enum extern false final fn for gen if impl in let loop macro \
                            match mod move mut override priv pub ref return self static struct \
                            super trait true try type typeof unsafe unsized use virtual where \
                            while yield";
    KEYWORDS.split_whitespace().any(|keyword| keyword == word)
}

/// Returns the section of a manifest that takes devcomm's crates from a checkout, and the folder of
/// this command there.
fn checkout(checkout: &Path) -> Result<(String, String)> {
    let metadata = MetadataCommand::new().current_dir(checkout).no_deps().exec();
    let metadata =
        metadata.with_context(|| format!("{} is not a checkout of devcomm", checkout.display()))?;
    let mut lines = String::from("\n# Not from the registry:\n[patch.crates-io]\n");
    let mut own = String::new();
    let mut published: Vec<_> = metadata.packages.iter().collect();
    // A package that is not published has an empty list of registries.
    published.retain(|one| one.publish.is_none());
    ensure!(
        published.iter().any(|package| package.name == "devcomm"),
        "{} is not a checkout of devcomm: its workspace has no package devcomm",
        checkout.display()
    );
    for package in published {
        let folder = package.manifest_path.parent().context("a manifest without a folder")?;
        if package.name == env!("CARGO_PKG_NAME") {
            // No project depends on this command.
            own = folder.to_string();
            continue;
        }
        // Only a feature of devcomm that a new project has not enabled needs it. Cargo warns of a
        // patch that nothing needs.
        let comment =
            if package.name == KERNELS_BIN { "# With \"devcomm/kernels-bin\": " } else { "" };
        lines += &format!("{comment}{} = {{ path = {:?} }}\n", package.name, folder.as_str());
    }
    Ok((lines, own))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds all files below a folder to `all`, as paths relative to `root`.
    fn files(folder: &Path, root: &Path, all: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => files(&path, root, all),
                false => all.push(path.strip_prefix(root).unwrap().display().to_string()),
            }
        }
    }

    #[test]
    fn a_project_has_every_file_of_the_template() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("template");
        let mut all = Vec::new();
        files(&root, &root, &mut all);
        // cargo-generate removes this ending, and its own settings.
        let mut all: Vec<&str> = all.iter().map(|name| name.trim_end_matches(".liquid")).collect();
        all.retain(|name| *name != "cargo-generate.toml");
        all.sort_unstable();
        let (fused, base): (Vec<&str>, Vec<&str>) =
            all.into_iter().partition(|name| name.starts_with("fused/"));
        assert_eq!(base, TEMPLATE.map(|(path, _)| path));
        assert_eq!(fused, FUSED.map(|(path, _)| format!("fused/{path}")));
    }

    #[test]
    fn a_project_has_its_name_in_place_of_all_placeholders() {
        let folder = tempfile::tempdir().unwrap();
        let project = folder.path().join("norm-squared");
        create(&project, None, true).unwrap();
        let text = |path: &str| fs::read_to_string(project.join(path)).unwrap();
        for (path, _) in TEMPLATE.iter().chain(&FUSED) {
            assert!(!text(path).contains("{{"), "{path}");
            assert!(!text(path).contains("ANCHOR"), "{path}");
        }
        assert!(text("Cargo.toml").contains("name = \"norm-squared\""));
        assert!(text("build.rs").contains("\"norm-squared-kernels\""));
        assert!(text("src/main.rs").contains("use norm_squared::"));
        for (path, _, more) in WITH_FUSED {
            assert!(text(path).contains(more), "{path}");
        }
    }

    #[test]
    fn a_project_of_a_checkout_installs_the_command_and_its_crates_from_it() {
        let folder = tempfile::tempdir().unwrap();
        let project = folder.path().join("sums");
        // Relative to this folder, not to the project's.
        let crates = Some(PathBuf::from("../.."));
        New { folder: project.clone(), name: None, fused: false, crates }.run().unwrap();
        let manifest = fs::read_to_string(project.join("Cargo.toml")).unwrap();
        let patches = |name: &str| manifest.lines().any(|line| line.starts_with(name));
        assert!(patches("devcomm-sim") && !patches(KERNELS_BIN), "{manifest}");
        let readme = fs::read_to_string(project.join("README.md")).unwrap();
        let command = install_from(env!("CARGO_MANIFEST_DIR")) + "\n";
        assert!(readme.contains(&command) && !readme.contains(INSTALL), "{readme}");
    }

    #[test]
    fn the_command_that_installs_from_a_checkout_is_one_for_the_shell() {
        assert_eq!(install_from("/src/cli"), "cargo install --path /src/cli");
        assert_eq!(install_from("/my code/cli"), "cargo install --path '/my code/cli'");
    }

    #[test]
    fn a_folder_with_files_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("notes"), "mine").unwrap();
        let error = create(folder.path(), Some("mine"), false).unwrap_err().to_string();
        assert!(error.contains("not an empty folder"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn names_that_do_not_compile_are_refused_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let project = folder.path().join("project");
        for name in ["", "3d", "a b", "ü", "match", "Self", "devcomm", "cuda-std", "../x"] {
            let error = create(&project, Some(name), false).unwrap_err().to_string();
            assert!(error.contains("--name"), "{name}: {error}");
        }
        assert!(!project.exists());
    }

    #[test]
    fn another_workspace_is_not_taken_for_devcomms() {
        let folder = tempfile::tempdir().unwrap();
        let error = format!("{:#}", checkout(folder.path()).unwrap_err());
        assert!(error.contains("is not a checkout of devcomm"), "{error}");
        create(folder.path(), Some("other"), false).unwrap();
        let error = format!("{:#}", checkout(folder.path()).unwrap_err());
        assert!(error.contains("has no package devcomm"), "{error}");
    }
}
