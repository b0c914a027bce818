//! Draws a timeline: the spans of each row as bars, and messages as arrows.

use std::fmt::{self, Write};

use super::{Message, Record, Row, Span};

/// Sizes in pixels: the width of the rows' names and that of all bars, the height of a row and that
/// of its bar, and the height of the title.
const LABELS: f64 = 200.0;
const BARS: f64 = 760.0;
const ROW: f64 = 22.0;
const BAR: f64 = 16.0;
const TOP: f64 = 30.0;
/// The width of a character of a bar's text.
const CHARACTER: f64 = 6.8;
/// The maximum number of rows that are drawn.
const MOST_ROWS: usize = 100;

/// Text in XML.
struct Xml<'a>(&'a str);

impl fmt::Display for Xml<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|char| match char {
            '<' => f.write_str("&lt;"),
            '&' => f.write_str("&amp;"),
            '"' => f.write_str("&quot;"),
            _ => f.write_char(char),
        })
    }
}

impl Span {
    fn colour(&self) -> &'static str {
        match (self.waits, &self.row) {
            (true, _) => "#f2c879",
            (false, Row::Block(..)) => "#8cc7a1",
            (false, Row::Host(_)) => "#c9c9c9",
            (false, _) => "#9dbfe3",
        }
    }
}

/// Returns the picture as SVG.
pub(super) fn picture(record: &Record) -> String {
    let mut drawing = Drawing::new(record);
    drawing.labels();
    // Waits lie within what they interrupt, and are drawn over it.
    let mut spans: Vec<&Span> = record.spans.iter().collect();
    spans.sort_by_key(|span| span.waits);
    spans.into_iter().for_each(|span| drawing.span(span));
    record.messages.iter().for_each(|message| drawing.message(message));
    drawing.failure();
    drawing.title();
    drawing.out.push_str("</svg>\n");
    drawing.out
}

/// A picture that is being drawn.
struct Drawing<'a> {
    record: &'a Record,
    rows: Vec<(usize, Row)>,
    /// The top of each row that is drawn.
    tops: Vec<f64>,
    /// The bottom of the last row.
    bottom: f64,
    out: String,
}

impl<'a> Drawing<'a> {
    fn new(record: &'a Record) -> Self {
        let rows = record.rows();
        let mut tops = Vec::new();
        let (mut y, mut last) = (TOP, None);
        for (rank, _) in rows.iter().take(MOST_ROWS) {
            // The rows of different ranks are apart.
            if last.replace(*rank).is_some_and(|last| last != *rank) {
                y += ROW / 2.0;
            }
            tops.push(y);
            y += ROW;
        }
        let (width, height) = (LABELS + BARS + 10.0, y + 20.0);
        let out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
             <defs><marker id=\"tip\" markerWidth=\"7\" markerHeight=\"6\" refX=\"6\" refY=\"3\" \
             orient=\"auto\"><path d=\"M0,0 L7,3 L0,6 z\" fill=\"#b5392f\"/></marker></defs>\n"
        );
        Self { record, rows, tops, bottom: y, out }
    }

    fn line(&mut self, text: &str) {
        self.out.push_str(text);
        self.out.push('\n');
    }

    /// Returns the horizontal position of a time.
    fn x(&self, time: u64) -> f64 {
        LABELS + BARS * time as f64 / self.record.end().max(1) as f64
    }

    /// Returns the top of a row, if it is drawn.
    fn top(&self, rank: usize, row: &Row) -> Option<f64> {
        let found = self.rows.binary_search_by(|(other, name)| (other, name).cmp(&(&rank, row)));
        self.tops.get(found.ok()?).copied()
    }

    /// Writes the names of the rows.
    fn labels(&mut self) {
        for i in 0..self.tops.len() {
            let (rank, row) = &self.rows[i];
            let (y, name) = (self.tops[i] + BAR - 4.0, row.to_string());
            let label = format!("<text x=\"4\" y=\"{y}\">rank {rank}: {}</text>", Xml(&name));
            self.line(&label);
        }
    }

    /// Draws a bar, with as much of its name as fits.
    fn span(&mut self, span: &Span) {
        let Some(top) = self.top(span.rank, &span.row) else { return };
        let (left, right) = (self.x(span.begin), self.x(span.end));
        let wide = (right - left).max(1.0);
        let at = span.at.map_or(String::new(), |at| format!(", {at}"));
        self.line(&format!(
            "<rect x=\"{left:.1}\" y=\"{top}\" width=\"{wide:.1}\" height=\"{BAR}\" fill=\"{}\" \
             stroke=\"#ffffff\" stroke-width=\"0.5\"><title>{}{}</title></rect>",
            span.colour(),
            Xml(&span.name),
            Xml(&at),
        ));
        let letters = (wide / CHARACTER) as usize;
        if letters >= 4 {
            let whole = span.name.chars().count() <= letters;
            let text: String = span.name.chars().take(letters - usize::from(!whole)).collect();
            let more = if whole { "" } else { "…" };
            let (x, y) = (left + 3.0, top + BAR - 4.0);
            self.line(&format!("<text x=\"{x:.1}\" y=\"{y}\">{}{more}</text>", Xml(&text)));
        }
    }

    /// Draws an arrow from the row that sends a message to the network of the rank that gets it.
    fn message(&mut self, message: &Message) {
        let (rank, row) = &message.from;
        let (Some(from), Some(to)) = (self.top(*rank, row), self.top(message.to, &Row::Network))
        else {
            return;
        };
        self.line(&format!(
            "<line x1=\"{:.1}\" y1=\"{}\" x2=\"{:.1}\" y2=\"{}\" stroke=\"#b5392f\" \
             marker-end=\"url(#tip)\"><title>{}, {}</title></line>",
            self.x(message.posted),
            from + BAR / 2.0,
            self.x(message.arrived),
            to + BAR / 2.0,
            Xml(&message.name),
            Xml(&message.at.to_string()),
        ));
    }

    /// Draws a line at the time of a failure, through all rows.
    fn failure(&mut self) {
        let Some((time, error)) = &self.record.failure else { return };
        let (x, y) = (self.x(*time), self.bottom);
        self.line(&format!(
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{y}\" stroke=\"#d00000\" \
             stroke-width=\"2\"><title>{}</title></line>",
            Xml(error)
        ));
    }

    /// Writes how long the run took, and what is left out.
    fn title(&mut self) {
        let left_out = self.rows.len().saturating_sub(MOST_ROWS);
        let rest = match (left_out, self.record.is_cut) {
            (0, false) => String::new(),
            (0, true) => "; the end of the run is left out".to_owned(),
            (more, _) => format!("; {more} rows are left out"),
        };
        let title = format!("{} rounds of the simulated GPUs{rest}", self.record.end());
        self.line(&format!("<text x=\"4\" y=\"18\" fill=\"#555555\">{}</text>", Xml(&title)));
    }
}
