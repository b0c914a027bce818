//! The commands `report`, which writes a page of ratios and plots (docs/measurements.md) from files
//! of rows, and `rows`, which prints such a file. A row is one measured case: an operation and a
//! size by one variant.

pub mod compare;
mod cost;
mod file;
pub mod model;
pub mod nccl_tests;
mod page;
mod plot;
pub mod ratio;
pub mod row;
pub mod table;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::base::output::write;
use file::File;

/// The flags of `report`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Folder with files of rows, which the benchmarks write with --json; NAME-start2.json has the
    /// rows of NAME.json, measured again by a new process
    #[arg(long, value_name = "FOLDER", default_value = "docs/measurements")]
    from: PathBuf,

    /// The page, in Markdown
    #[arg(long, value_name = "FILE", default_value = "docs/measurements.md")]
    to: PathBuf,
}

/// Writes the page, and the plots next to the files.
pub fn run(options: &Options) -> Result<()> {
    let Options { from, to } = options;
    let files = read(from)?;
    let page = page::markdown(&files, &link(from, to));
    write(to, &page)?;
    for file in &files {
        if let Some(plot) = &file.plot {
            write(&from.join(file.plot_name()), plot)?;
        }
    }
    println!("{} has the ratios of {} files", to.display(), files.len());
    Ok(())
}

/// The flags of `rows`.
#[derive(Args, Clone, Debug)]
pub struct RowsOptions {
    /// Files of rows, which the benchmarks write with --json, such as those of docs/measurements
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Prints the rows of files as their runs printed them.
pub fn rows(options: &RowsOptions) -> Result<()> {
    options.files.iter().try_for_each(|path| file::print(path))
}

/// Returns the files of a folder, by name, each with the repetitions of its measurement.
fn read(folder: &Path) -> Result<Vec<File>> {
    let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
    let entries = entries.with_context(|| format!("cannot read {}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    ensure!(!paths.is_empty(), "{} has no JSON file", folder.display());
    paths.sort_by_key(|path| path.file_stem().map(ToOwned::to_owned));
    let mut files: Vec<File> = Vec::new();
    for path in paths {
        let file = File::read(&path)?;
        match file.stem().split_once("-start") {
            Some((first, _)) => {
                let found = files.iter_mut().find(|other| other.stem() == first);
                let found = found.with_context(|| format!("there is no {first}.json"));
                found.and_then(|first| first.join(&file)).with_context(|| {
                    format!("{} does not repeat the measurement", path.display())
                })?;
            }
            None => files.push(file),
        }
    }
    Ok(files)
}

/// Returns the path by which links on the page name the folder.
fn link(folder: &Path, page: &Path) -> String {
    let relative = page.parent().and_then(|parent| folder.strip_prefix(parent).ok());
    relative.unwrap_or(folder).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_measurements_is_what_report_makes_of_the_files() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let (from, to) = (docs.join("measurements"), docs.join("measurements.md"));
        let files = read(&from).unwrap();
        let page = page::markdown(&files, &link(&from, &to));
        let written = fs::read_to_string(to).unwrap();
        assert!(page == written, "docs/measurements.md: run `devcomm-bench report`");
        assert!(page.lines().count() <= 400, "the page is longer than 400 lines");
        for file in &files {
            let written = fs::read_to_string(from.join(file.plot_name())).ok();
            assert!(file.plot == written, "{}: run `devcomm-bench report`", file.plot_name());
        }
    }
}
