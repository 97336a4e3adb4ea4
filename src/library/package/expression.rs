//! Sizes that depend on other sizes, written as torch.export writes them: `2*s17`, `s17 + 1`.

use std::collections::BTreeMap;

/// The values of symbols such as `s17`.
pub(super) type Symbols = BTreeMap<String, i64>;

/// A size or a stride.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expression {
    Number(i64),
    Symbol(String),
    Sum(Box<Expression>, Box<Expression>),
    Difference(Box<Expression>, Box<Expression>),
    Product(Box<Expression>, Box<Expression>),
    /// Rounded down, as in Python.
    Quotient(Box<Expression>, Box<Expression>),
    Max(Box<Expression>, Box<Expression>),
    Min(Box<Expression>, Box<Expression>),
}

impl Expression {
    /// Reads an expression, or says what in it cannot be read.
    pub fn read(text: &str) -> Result<Expression, String> {
        if text.len() > LONGEST {
            return Err(format!("more than {LONGEST} letters"));
        }
        let mut reader = Reader { rest: text.trim_start() };
        let expression = reader.sum()?;
        match reader.rest {
            "" => Ok(expression),
            rest => Err(format!("{rest:?} in {text:?}")),
        }
    }

    /// The value, or `None` if a symbol has none or the value is out of range.
    pub fn value(&self, symbols: &Symbols) -> Option<i64> {
        let both = |a: &Expression, b: &Expression| Some((a.value(symbols)?, b.value(symbols)?));
        match self {
            Expression::Number(number) => Some(*number),
            Expression::Symbol(name) => symbols.get(name).copied(),
            Expression::Sum(a, b) => both(a, b).and_then(|(a, b)| a.checked_add(b)),
            Expression::Difference(a, b) => both(a, b).and_then(|(a, b)| a.checked_sub(b)),
            Expression::Product(a, b) => both(a, b).and_then(|(a, b)| a.checked_mul(b)),
            Expression::Quotient(a, b) => {
                let (a, b) = both(a, b)?;
                let quotient = a.checked_div(b)?;
                let is_above = a % b != 0 && (a < 0) != (b < 0);
                Some(quotient - i64::from(is_above))
            }
            Expression::Max(a, b) => both(a, b).map(|(a, b)| a.max(b)),
            Expression::Min(a, b) => both(a, b).map(|(a, b)| a.min(b)),
        }
    }

    /// The names of its symbols.
    pub fn symbols<'a>(&'a self, into: &mut Vec<&'a str>) {
        match self {
            Expression::Number(_) => {}
            Expression::Symbol(name) => into.push(name),
            Expression::Sum(a, b)
            | Expression::Difference(a, b)
            | Expression::Product(a, b)
            | Expression::Quotient(a, b)
            | Expression::Max(a, b)
            | Expression::Min(a, b) => {
                a.symbols(into);
                b.symbols(into);
            }
        }
    }
}

/// The longest text that is read. Reading recurses, so a longer one might overflow the stack.
const LONGEST: usize = 500;

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn take(&mut self, token: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(token) else { return false };
        self.rest = rest.trim_start();
        true
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.take(token) {
            Ok(())
        } else {
            Err(format!("{:?}, where {token:?} belongs", self.rest))
        }
    }

    fn sum(&mut self) -> Result<Expression, String> {
        let mut left = self.product()?;
        loop {
            let make: fn(_, _) -> _ = match () {
                () if self.take("+") => Expression::Sum,
                () if self.take("-") => Expression::Difference,
                () => return Ok(left),
            };
            left = make(Box::new(left), Box::new(self.product()?));
        }
    }

    fn product(&mut self) -> Result<Expression, String> {
        let mut left = self.atom()?;
        loop {
            let is_power = self.rest.starts_with("**");
            let make: fn(_, _) -> _ = match () {
                () if !is_power && self.take("*") => Expression::Product,
                () if self.take("//") => Expression::Quotient,
                () => return Ok(left),
            };
            left = make(Box::new(left), Box::new(self.atom()?));
        }
    }

    fn atom(&mut self) -> Result<Expression, String> {
        if self.take("-") {
            let zero = Box::new(Expression::Number(0));
            return Ok(Expression::Difference(zero, Box::new(self.atom()?)));
        }
        if self.take("(") {
            let inner = self.sum()?;
            self.expect(")")?;
            return Ok(inner);
        }
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let end = self.rest.find(|letter| !is_part(letter)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        let unreadable = format!("{:?}", self.rest);
        self.rest = rest.trim_start();
        if word.starts_with(|letter: char| letter.is_ascii_digit()) {
            return word.parse().map(Expression::Number).map_err(|_| unreadable);
        }
        let make: fn(_, _) -> _ = match word {
            "" => return Err(unreadable),
            "Max" => Expression::Max,
            "Min" => Expression::Min,
            "FloorDiv" => Expression::Quotient,
            _ if self.rest.starts_with('(') => return Err(unreadable),
            _ => return Ok(Expression::Symbol(word.to_string())),
        };
        self.expect("(")?;
        let first = self.sum()?;
        self.expect(",")?;
        let second = self.sum()?;
        self.expect(")")?;
        Ok(make(Box::new(first), Box::new(second)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Option<i64> {
        let symbols = Symbols::from([("s0".to_string(), 5), ("s17".to_string(), 3)]);
        Expression::read(text).expect("an expression").value(&symbols)
    }

    #[test]
    fn expressions_have_the_values_that_python_computes() {
        for (text, expected) in [
            ("7", 7),
            ("s17", 3),
            ("2*s17", 6),
            ("s0 + 2*s17 - 1", 10),
            ("s0 - s17 - 1", 1),
            ("(s0 + 1)*s17", 18),
            ("((s0//2))", 2),
            ("-s0//2", -3),
            ("FloorDiv(s0, 2) + 1", 3),
            ("Max(1, s0)*Min(s17, 2)", 10),
            ("-3 + s0", 2),
        ] {
            assert_eq!(value(text), Some(expected), "{text}");
        }
        assert_eq!(value("s1"), None);
        assert_eq!(value("s0//0"), None);
        assert_eq!(value("9223372036854775807*2"), None);
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let deep = "(".repeat(100_000);
        for text in ["", "s0 +", "s0**2", "ceiling(s0)", "s0 s1", "(s0", "1.5", "Max(1)", &deep] {
            assert!(Expression::read(text).is_err(), "{text}");
        }
        let minus = "-".repeat(3);
        assert_eq!(value(&format!("{minus}s0")), Some(-5));
    }
}
