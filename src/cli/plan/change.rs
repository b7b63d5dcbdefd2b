//! `--what-if`: other machines, and what each would make of a token.

use std::fmt;

use crate::cli::size;
use crate::limits::MAX_THREADS;
use millstream_io::limits::DRIVES_MAX;

/// A machine that differs from this one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Change {
    /// Bytes of memory that the process may use: what `--ram` would say.
    pub ram: Option<u64>,
    /// What the drive reads, in GB/s.
    pub disk: Option<f64>,
    /// Drives that all hold the model.
    pub drives: Option<u64>,
    /// Cores.
    pub cores: Option<u64>,
}

impl Change {
    /// Reads `ram=64G,disk=7GB/s,drives=2,cores=16`, any of them.
    pub fn parse(text: &str) -> Result<Change, String> {
        let (mut change, mut before) = (Change::default(), Vec::new());
        for part in text.split(',') {
            let known = "ram=64G, disk=7GB/s, drives=2, cores=16";
            let (name, value) = part.trim().split_once('=').ok_or_else(|| format!("'{part}' is none of {known}"))?;
            let whole = |most: u64| match value.parse::<u64>() {
                Ok(n) if (1..=most).contains(&n) => Ok(n),
                _ => Err(format!("{name} takes a whole number from 1 to {most}, not '{value}'")),
            };
            if before.contains(&name) {
                return Err(format!("{name} is given twice"));
            }
            before.push(name);
            match name {
                "ram" => change.ram = Some(size::parse(value)?),
                "disk" => change.disk = Some(rate(value)?),
                "drives" => change.drives = Some(whole(DRIVES_MAX as u64)?),
                "cores" => change.cores = Some(whole(MAX_THREADS as u64)?),
                _ => return Err(format!("'{name}' is none of {known}")),
            }
        }
        Ok(change)
    }
}

/// `7`, `7GB/s` or `7.5G`, in GB/s.
fn rate(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    let number = number.strip_suffix("GB").or_else(|| number.strip_suffix('G')).unwrap_or(number);
    crate::cli::args::parse_rate(number).map_err(|why| format!("disk: {why}"))
}

/// A size that is short to type, a little less than `bytes`.
pub fn round(bytes: u64) -> u64 {
    size::parse(&size::typed(bytes)).unwrap_or(bytes)
}

/// A size in the largest unit that says it exactly, with a decimal or none.
fn exact(bytes: u64) -> String {
    let units = [(1u64 << 30, "G"), (1_000_000_000, "GB"), (1 << 20, "M"), (1_000_000, "MB")];
    let whole = units.into_iter().find(|(unit, _)| bytes > 0 && bytes.is_multiple_of(*unit));
    let tenth = |unit: u64, name: &str| format!("{:.1}{name}", bytes as f64 / unit as f64);
    let in_tenths = |&(unit, name): &(u64, &str)| bytes >= unit && size::parse(&tenth(unit, name)) == Ok(bytes);
    match (whole, units.iter().find(|unit| in_tenths(unit))) {
        (Some((unit, name)), _) => format!("{}{name}", bytes / unit),
        (None, Some(&(unit, name))) => tenth(unit, name),
        (None, None) => bytes.to_string(),
    }
}

impl fmt::Display for Change {
    /// As it is typed: what is shown reads back as it was.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.ram.map(|bytes| format!("ram={}", exact(bytes))),
            self.disk.map(|gb_s| format!("disk={gb_s}GB/s")),
            self.drives.map(|drives| format!("drives={drives}")),
            self.cores.map(|cores| format!("cores={cores}")),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_as_they_are_typed() {
        let change = Change::parse("ram=64G,disk=7GB/s,drives=2,cores=16").unwrap();
        assert_eq!(change, Change { ram: Some(64 << 30), disk: Some(7.0), drives: Some(2), cores: Some(16) });
        assert_eq!(change.to_string(), "ram=64G,disk=7GB/s,drives=2,cores=16");
        for text in [
            "ram=64GB",
            "ram=1536M",
            "ram=36.3G",
            "ram=7.4MB",
            "ram=12345678901",
            "disk=0.0002GB/s",
            "disk=0.000002GB/s,cores=3",
        ] {
            assert_eq!(Change::parse(text).unwrap().to_string(), text);
        }
        // A tenth of 2^30 is no whole number of bytes: what is shown for it is what is read.
        assert_eq!(round(41_450_362_880), 41_446_434_406);
        assert_eq!(Change { ram: Some(round(41_450_362_880)), ..Change::default() }.to_string(), "ram=38.6G");
        for same in ["disk=7", "disk=7G", "disk=7GB", "disk=7.0GB/s"] {
            assert_eq!(Change::parse(same), Ok(Change { disk: Some(7.0), ..Change::default() }), "{same}");
        }
        for bad in [
            "",
            "ram",
            "ram=",
            "ram=x",
            "disk=0",
            "disk=-1",
            "disk=7MB/s",
            "drives=0",
            "cores=1.5",
            "gpu=1",
            "cores=2,cores=2",
        ] {
            assert!(Change::parse(bad).is_err(), "{bad}");
        }
    }
}
