//! The pictures of the guide, `docs/guide/src/pictures`.

use std::fmt::Write;

/// Returns each picture's file name and text.
#[must_use]
pub fn all() -> [(&'static str, String); 6] {
    [
        ("teams.svg", teams()),
        ("window.svg", window()),
        ("barrier.svg", barrier()),
        ("put.svg", put()),
        ("shots.svg", shots()),
        ("fused.svg", fused()),
    ]
}

const BLUE: &str = "#cfe2f3";
const GREEN: &str = "#d9ead3";
const YELLOW: &str = "#fff2cc";
const RED: &str = "#f4cccc";
const WHITE: &str = "#ffffff";
/// Styles of an arrow; a dashed one shows a wait.
const SOLID: &str = "";
const DASHED: &str = " stroke-dasharray=\"4 3\"";

/// An SVG picture. Coordinates are in pixels.
struct Picture {
    size: (u32, u32),
    body: String,
}

impl Picture {
    fn new(width: u32, height: u32) -> Self {
        Self { size: (width, height), body: String::new() }
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        self.body.write_fmt(element).expect("a string takes all");
        self.body.push('\n');
    }

    /// Adds a box with a text in its middle.
    fn area(&mut self, (x, y): (u32, u32), (width, height): (u32, u32), fill: &str, text: &str) {
        self.add(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"3\" \
             fill=\"{fill}\" stroke=\"#555\"/>"
        ));
        self.text((x + width / 2, y + height / 2 + 5), text);
    }

    fn text(&mut self, (x, y): (u32, u32), text: &str) {
        self.add(format_args!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>"));
    }

    fn label(&mut self, (x, y): (u32, u32), text: &str) {
        self.add(format_args!("<text x=\"{x}\" y=\"{y}\">{text}</text>"));
    }

    fn arrow(&mut self, (x1, y1): (u32, u32), (x2, y2): (u32, u32), style: &str) {
        self.add(format_args!(
            "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"#333\"{style} \
             marker-end=\"url(#end)\"/>"
        ));
    }

    fn finish(self) -> String {
        let (width, height) = self.size;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" font-family=\"sans-serif\" font-size=\"13\">\n<defs><marker \
             id=\"end\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" \
             markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" \
             fill=\"#333\"/></marker></defs>\n<rect width=\"{width}\" height=\"{height}\" \
             fill=\"#ffffff\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// Draws eight ranks in two LSA teams of four, and one of the four rails.
fn teams() -> String {
    let mut picture = Picture::new(640, 186);
    picture.label((20, 22), "the world: 8 ranks");
    for team in 0..2 {
        let x = 20 + 310 * team;
        picture.area((x, 34), (290, 100), BLUE, "");
        picture.text((x + 145, 52), &format!("LSA team {team}: loads and stores"));
        for rank in 0..4 {
            let fill = if rank == 1 { YELLOW } else { WHITE };
            let at = (x + 12 + 68 * rank, 64);
            picture.area(at, (60, 30), fill, &format!("{}", 4 * team + rank));
            picture.text((at.0 + 30, 116), &format!("LSA {rank}"));
        }
    }
    picture.arrow((275, 150), (118, 136), SOLID);
    picture.arrow((275, 150), (428, 136), SOLID);
    picture.text((275, 172), "a rail: ranks 1 and 5, over the network (GIN)");
    picture.finish()
}

/// Draws a window of three ranks, and the pointers that rank 1 has into it.
fn window() -> String {
    let mut picture = Picture::new(640, 150);
    picture.label((20, 22), "one window, 100 elements in each rank");
    for rank in 0..3 {
        let x = 20 + 205 * rank;
        let fill = if rank == 1 { YELLOW } else { BLUE };
        picture.area((x, 34), (190, 34), fill, &format!("the part of rank {rank}"));
        let pointer = ["window.lsa(0)", "window.local()", "window.lsa(2)"][rank as usize];
        picture.text((x + 95, 140), pointer);
        picture.arrow((x + 95, 124), (x + 95, 70), SOLID);
    }
    picture.label((20, 100), "in the kernel of rank 1:");
    picture.finish()
}

/// Draws two ranks that arrive at a barrier at different times.
fn barrier() -> String {
    let mut picture = Picture::new(640, 170);
    for (rank, arrival) in [(0, 180), (1, 330)] {
        let y = 30 + 70 * rank;
        picture.label((20, y + 20), &format!("rank {rank}"));
        picture.area((80, y), (arrival - 80, 30), GREEN, "before: stores");
        picture.area((380, y), (240, 30), GREEN, "after: loads of what peers stored");
        if rank == 0 {
            picture.area((arrival, y), (380 - arrival, 30), YELLOW, "waits");
        } else {
            picture.area((arrival, y), (380 - arrival, 30), YELLOW, "");
        }
    }
    picture.arrow((180, 60), (330, 98), SOLID);
    picture.arrow((330, 100), (378, 62), SOLID);
    picture.label((80, 158), "arrive: my stores are visible (Release)");
    picture.label((380, 158), "wait: I see yours (Acquire)");
    picture.finish()
}

/// Draws a put with a signal, from its post to the target's wait.
fn put() -> String {
    let mut picture = Picture::new(640, 190);
    picture.label((20, 45), "source");
    picture.label((20, 125), "target");
    picture.area((90, 25), (70, 30), GREEN, "post");
    picture.area((160, 25), (200, 30), RED, "do not write the source");
    picture.area((360, 25), (60, 30), YELLOW, "flush");
    picture.area((420, 25), (200, 30), GREEN, "the source is free");
    picture.area((90, 105), (350, 30), RED, "do not read the target");
    picture.area((440, 105), (90, 30), YELLOW, "wait_signal");
    picture.area((530, 105), (90, 30), GREEN, "read it");
    picture.arrow((200, 57), (300, 103), SOLID);
    picture.text((215, 90), "data");
    picture.arrow((330, 57), (440, 103), SOLID);
    picture.text((352, 90), "signal");
    picture.label((90, 170), "The signal is added after the data has arrived.");
    picture.finish()
}

/// Draws the parts that a rank of four receives.
fn shots() -> String {
    let mut picture = Picture::new(640, 200);
    picture.label((20, 22), "one step: rank 0 receives all of three peers");
    for peer in 0..3 {
        picture.area((20 + 140 * peer, 34), (130, 26), BLUE, &format!("S of rank {}", peer + 1));
    }
    picture.label((20, 96), "two steps: a quarter of each peer, then three quarters of sums");
    for peer in 0..3 {
        let x = 20 + 40 * peer;
        picture.area((x, 108), (32, 26), BLUE, "S/4");
        picture.area((x + 160, 108), (32, 26), GREEN, "S/4");
    }
    picture.text((76, 155), "reduce");
    picture.text((236, 155), "store the sums");
    picture.arrow((138, 121), (176, 121), DASHED);
    picture.label((20, 186), "S: the bytes of a rank's elements. 3 S against 6/4 S.");
    picture.finish()
}

/// Draws a block's work over time: in step 2 products and then sums, in step 3 both in turns.
fn fused() -> String {
    let mut picture = Picture::new(640, 190);
    picture.label((20, 22), "step 2");
    for tile in 0..3 {
        picture.area((20 + 100 * tile, 32), (96, 28), GREEN, &format!("product {tile}"));
        picture.area((376 + 66 * tile, 32), (62, 28), BLUE, &format!("sum {tile}"));
    }
    picture.area((320, 32), (52, 28), YELLOW, "barrier");
    picture.label((20, 92), "step 3");
    let work = ["product 0", "product 1", "sum 0", "product 2", "sum 1", "sum 2"];
    let mut x = 20;
    for name in work {
        let (width, fill) = if name.starts_with('p') { (96, GREEN) } else { (62, BLUE) };
        picture.area((x, 102), (width, 28), fill, name);
        if name.starts_with('p') {
            picture.arrow((x + 90, 130), (x + 110, 158), SOLID);
        }
        x += width + 4;
    }
    picture.label((20, 180), "Arrows: a tile's sums are on their way to its owner.");
    picture.finish()
}
