//! A file of rows, as a comparison's `--json` wrote it, and its ratios.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::contenders::Contest;
use crate::harness::header::Header;
use crate::report::plot;
use crate::report::ratio::{Ratio, Summary, ratios};
use crate::report::row::Row;
use crate::report::table::{self, Report};

/// A file with its ratios.
pub struct File {
    /// The name, without folder.
    pub name: String,
    pub header: Header,
    /// The element types; empty for barriers.
    pub types: BTreeSet<String>,
    pub n_rows: usize,
    pub ratios: Vec<Ratio>,
    /// Whether the results of all variants in ratios were checked, in all starts.
    pub is_checked: bool,
    /// The rows, drawn; `None` for rows without times, and for those of `twins`.
    pub plot: Option<String>,
}

/// Reads a file, and returns the contest of its benchmark too. The header is read first, so that a
/// file of another command is refused by the command's name.
fn read(path: &Path) -> Result<(Header, Report<Row>, &'static Contest)> {
    #[derive(Deserialize)]
    struct Head {
        header: Header,
    }
    let name = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    let Head { header } = serde_json::from_str(&text)
        .with_context(|| format!("{name} has no rows of a comparison (--json)"))?;
    let benchmark = header.subcommand();
    let contest = Contest::of(benchmark)
        .with_context(|| format!("{name} is of `{benchmark}`, which compares nothing"))?;
    Ok((header, Report::read(path)?, contest))
}

/// Prints what the run printed.
pub fn print(path: &Path) -> Result<()> {
    let (header, report, contest) = read(path)?;
    println!("{header}\n{}\n", table::lines(&report.rows));
    if report.is_cut_off() {
        println!("# the run did not end: these are its first rows");
    }
    println!("{}", Summary::of(contest, &report.rows));
    Ok(())
}

impl File {
    /// Reads a file of a run that has ended, without wrong results.
    pub fn read(path: &Path) -> Result<Self> {
        let (header, report, contest) = read(path)?;
        let report = report.require_end(path)?;
        let summary = Summary::of(contest, &report.rows);
        summary.judge().with_context(|| path.display().to_string())?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let types = report.rows.iter().map(|row| row.dtype.clone());
        let (n_rows, ratios) = (report.rows.len(), ratios(contest, &report.rows));
        let competes = |row: &&Row| contest.competes(row.variant);
        let is_checked = report.rows.iter().filter(competes).all(|row| row.wrong.is_some());
        // In a plot of twins each line would cover its twin's.
        let plot = if contest.benchmark == "twins" { None } else { plot::svg(&report) };
        let types = types.filter(|name| name != "-").collect();
        Ok(Self { name, header, types, n_rows, ratios, is_checked, plot })
    }

    /// Returns the name without extension.
    pub fn stem(&self) -> &str {
        self.name.strip_suffix(".json").unwrap_or(&self.name)
    }

    /// Returns the plot's name, without folder.
    pub fn plot_name(&self) -> String {
        format!("{}.svg", self.stem())
    }

    /// Adds another start: the same subcommand with the same flags, but for those that name files,
    /// on a machine of the same kind.
    pub fn join(&mut self, other: &Self) -> Result<()> {
        let run = |File { header, .. }: &Self| {
            (header.subcommand().to_owned(), header.flags(""), header.machine_name())
        };
        ensure!(run(self) == run(other), "{} is of another command or machine", self.name);
        ensure!(self.ratios.len() == other.ratios.len(), "{} has other cases", self.name);
        for (ratio, same) in self.ratios.iter_mut().zip(&other.ratios) {
            ensure!(ratio.is_of(same), "it has a ratio of {}, not of {}", same.case, ratio.case);
            ratio.join(same);
        }
        self.is_checked &= other.is_checked;
        Ok(())
    }
}
