//! `model`: the times of collectives by [`CostModel`], fitted to measured rows, next to these rows.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use devcomm::{Algorithm, CollectiveKind};
use serde::Serialize;

use crate::base::{OutputOptions, Spread};
use crate::contenders::Variant;
use crate::report::cost::{CollectiveBy, CollectiveCase, CostModel};
use crate::report::row;
use crate::report::table::{self, Column, Report, number};

/// The flags of `model`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Files of rows (--json of the collectives) to compare with the model: of two ranks, or, in
    /// graphs, of more, which are those of one host
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Files of rows to fit the model to, of two ranks, comma-separated [default: the same]
    #[arg(long, value_delimiter = ',', value_name = "FILE")]
    fit: Vec<PathBuf>,

    /// Only these variants, comma-separated
    #[arg(long, value_delimiter = ',', value_name = "VARIANT")]
    #[arg(default_value = "rust-ops,nccl,nccl-sym")]
    variants: Vec<Variant>,

    /// Fail if the model is further off than this, in percent, in any row
    #[arg(long, value_name = "PERCENT")]
    within: Option<f64>,

    #[command(flatten)]
    output: OutputOptions,
}

/// Numbers of ranks to which the model is extrapolated.
const MORE_RANKS: [usize; 2] = [4, 8];

/// Fits, compares and prints.
pub fn run(options: &Options) -> Result<()> {
    options.output.validate()?;
    if let Some(other) = options.variants.iter().find(|variant| by(**variant).is_none()) {
        bail!("--variants {other}: the model knows rust-ops, nccl and nccl-sym");
    }
    let read = |files: &[PathBuf]| -> Result<Vec<Point>> {
        let points = files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?.concat();
        let has = |point: &Point| options.variants.contains(&point.row.variant);
        Ok(points.into_iter().filter(has).collect())
    };
    let points = read(&options.files)?;
    let fitted = if options.fit.is_empty() { points.clone() } else { read(&options.fit)? };
    let measured: Vec<_> = fitted.iter().map(|point| (point.case, point.us)).collect();
    let model = CostModel::fit(&measured)?;
    let mut report = Report::new();
    let rows: Vec<Row> = points.iter().filter_map(|point| Row::new(&model, point)).collect();
    ensure!(!rows.is_empty(), "the files of --fit have none of these collectives");
    println!("{}", report.add(rows, Some(&options.output))?);
    println!();
    model.to_string().lines().for_each(|line| println!("# {line}"));
    let errors = || report.rows.iter().map(|row| row.error_percent.abs());
    let median = Spread::of(errors()).map_or(0.0, |spread| spread.median);
    let worst = errors().fold(0.0, f64::max);
    println!("# error of the model: median {median:.1} %, at most {worst:.1} %");
    if let Some(within) = options.within {
        ensure!(worst <= within, "the model is {worst:.1} % off, which is more than {within} %");
    }
    Ok(())
}

/// A measured time.
#[derive(Clone)]
struct Point {
    case: CollectiveCase,
    row: row::Row,
    us: f64,
}

/// Returns the library of a variant, if the model knows the variant.
fn by(variant: Variant) -> Option<CollectiveBy> {
    match variant {
        Variant::RustOps => Some(CollectiveBy::Devcomm),
        Variant::Nccl => Some(CollectiveBy::Nccl),
        Variant::NcclSym => Some(CollectiveBy::NcclSymmetric),
        _ => None,
    }
}

/// Returns the measured times of a file.
fn read(path: &Path) -> Result<Vec<Point>> {
    let name = path.display();
    let Report { header, rows, .. } = Report::<row::Row>::read(path)?.require_end(path)?;
    let header = header.with_context(|| format!("{name} has no header"))?;
    let kind = header.subcommand().parse::<CollectiveKind>();
    let kind = kind.with_context(|| format!("{name} is of no collective"))?;
    let (ranks, in_graph) = (header.ranks, header.in_graphs());
    ensure!(ranks > 1, "{name} is of one rank, which sends nothing");
    ensure!(ranks == 2 || in_graph, "{name} is of {ranks} ranks without graphs: there is no model");
    let point = |row: row::Row| {
        let by = by(row.variant)?;
        let algorithm = match row.algorithm.as_deref() {
            Some("Lamport") => Algorithm::Lamport,
            Some("Push") => Algorithm::Push,
            Some("Pull") => Algorithm::Pull,
            // NCCL's rows name its configuration or nothing.
            _ => Algorithm::Nccl,
        };
        let case = CollectiveCase { kind, by, algorithm, ranks, in_graph, bytes: row.size };
        Some(Point { case, us: row.time_us?, row })
    };
    // Of NCCL only its own choice of algorithms is modelled: `unmixed`, and `mixed`, which has no
    // name.
    let is_plain = |row: &row::Row| {
        !row.in_place && row.asked.as_deref().is_none_or(|asked| asked == "unmixed")
    };
    Ok(rows.into_iter().filter(is_plain).filter_map(point).collect())
}

impl Row {
    /// Returns the row of a point; `None` if the model was not fitted to such cases.
    fn new(model: &CostModel, Point { case, row, us }: &Point) -> Option<Self> {
        let model_us = model.us(case)?;
        let on = |ranks| model.us(&CollectiveCase { ranks, ..*case });
        let [us_on_4, us_on_8] = MORE_RANKS.map(on);
        Some(Self {
            collective: case.kind.to_string(),
            dtype: row.dtype.clone(),
            size: row.size,
            variant: row.variant.to_string(),
            algorithm: case.algorithm.to_string(),
            us: *us,
            model_us,
            error_percent: (model_us / us - 1.0) * 100.0,
            us_on_4,
            us_on_8,
        })
    }
}

/// A measured time and the model's.
#[derive(Debug, Serialize)]
struct Row {
    collective: String,
    #[serde(rename = "type")]
    dtype: String,
    size: usize,
    variant: String,
    algorithm: String,
    us: f64,
    model_us: f64,
    error_percent: f64,
    us_on_4: Option<f64>,
    us_on_8: Option<f64>,
}

impl table::Row for Row {
    const COLUMNS: &'static [Column<Self>] = &[
        Column::new("collective", "", 0, |row| Some(row.collective.clone())),
        Column::new("type", "", 0, |row| Some(row.dtype.clone())),
        Column::new("variant", "", 0, |row| Some(row.variant.clone())),
        Column::new("algorithm", "", 0, |row| Some(row.algorithm.clone())),
        Column::new("size", "B", 0, |row| Some(row.size.to_string())),
        Column::new("time", "us", 0, |row| number(Some(row.us), 2)),
        Column::new("model", "us", 0, |row| number(Some(row.model_us), 2)),
        Column::new("error", "%", 0, |row| Some(format!("{:+.1}", row.error_percent))),
        Column::new("on 4 GPUs", "us, model", 0, |row| number(row.us_on_4, 2)),
        Column::new("on 8 GPUs", "us, model", 0, |row| number(row.us_on_8, 2)),
    ];
    const TEXT_COLUMNS: usize = 4;
}
